"""VPC endpoints and flow logs."""

from __future__ import annotations

import json
from typing import Any

from trainlocal.cloud.resources.ec2_tags import tag_ec2
from trainlocal.cloud.resources.provider import Place, Provider, provides
from trainlocal.cloud.resources.schema import DOCUMENT, FLAG, TAGS, TEXT, TEXTS, WHOLE, record


@provides
class VpcEndpoint(Provider):
    """A private way to an AWS service."""

    type = "AWS::EC2::VPCEndpoint"
    schema = record(
        PolicyDocument=DOCUMENT,
        PrivateDnsEnabled=FLAG,
        RouteTableIds=TEXTS,
        SecurityGroupIds=TEXTS,
        ServiceName=TEXT,
        SubnetIds=TEXTS,
        Tags=TAGS,
        VpcEndpointType=TEXT,
        VpcId=TEXT,
        required="ServiceName VpcId",
    )
    replacing = frozenset({"ServiceName", "VpcEndpointType", "VpcId"})
    attributes = frozenset({"DnsEntries", "Id", "NetworkInterfaceIds"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        request = {name: value for name, value in properties.items() if name not in ("Tags", "PolicyDocument")}
        if "PolicyDocument" in properties:
            request["PolicyDocument"] = json.dumps(properties["PolicyDocument"])
        made: str = place.client("ec2").create_vpc_endpoint(**request)["VpcEndpoint"]["VpcEndpointId"]
        tag_ec2(place, made, properties)
        return made

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        request: dict[str, Any] = {}
        for name in ("RouteTableIds", "SecurityGroupIds", "SubnetIds"):
            now, was = set(properties.get(name, [])), set(before.get(name, []))
            request |= {f"Add{name}": sorted(now - was)} if now - was else {}
            request |= {f"Remove{name}": sorted(was - now)} if was - now else {}
        if properties.get("PolicyDocument") != before.get("PolicyDocument"):
            request["PolicyDocument"] = json.dumps(properties.get("PolicyDocument", {}))
        if request:
            place.client("ec2").modify_vpc_endpoint(VpcEndpointId=physical_id, **request)
        tag_ec2(place, physical_id, properties)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("ec2").delete_vpc_endpoints(VpcEndpointIds=[physical_id])

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        if name == "Id":
            return physical_id
        endpoint = place.client("ec2").describe_vpc_endpoints(VpcEndpointIds=[physical_id])["VpcEndpoints"][0]
        if name == "NetworkInterfaceIds":
            return endpoint.get("NetworkInterfaceIds", [])
        return [f"{entry['HostedZoneId']}:{entry['DnsName']}" for entry in endpoint.get("DnsEntries", [])]


@provides
class FlowLog(Provider):
    """A record of a network's traffic."""

    type = "AWS::EC2::FlowLog"
    schema = record(
        DeliverLogsPermissionArn=TEXT,
        LogDestination=TEXT,
        LogDestinationType=TEXT,
        LogFormat=TEXT,
        LogGroupName=TEXT,
        MaxAggregationInterval=WHOLE,
        ResourceId=TEXT,
        ResourceType=TEXT,
        Tags=TAGS,
        TrafficType=TEXT,
        required="ResourceId ResourceType",
    )
    replacing = frozenset(schema.fields) - {"Tags"}
    attributes = frozenset({"Id"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        request = {name: value for name, value in properties.items() if name not in ("Tags", "ResourceId")}
        answer = place.client("ec2").create_flow_logs(ResourceIds=[properties["ResourceId"]], **request)
        if answer.get("Unsuccessful"):
            raise ValueError(answer["Unsuccessful"][0]["Error"]["Message"])
        made: str = answer["FlowLogIds"][0]
        tag_ec2(place, made, properties)
        return made

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        tag_ec2(place, physical_id, properties)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("ec2").delete_flow_logs(FlowLogIds=[physical_id])

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return physical_id
