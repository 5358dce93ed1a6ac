"""VPCs, subnets, route tables and routes."""

from __future__ import annotations

from typing import Any

from trainlocal.cloud.resources.ec2_tags import tag_ec2
from trainlocal.cloud.resources.provider import Place, Provider, provides, undone_on_error
from trainlocal.cloud.resources.schema import FLAG, TAGS, TEXT, record


@provides
class Vpc(Provider):
    """A virtual network."""

    type = "AWS::EC2::VPC"
    schema = record(
        CidrBlock=TEXT,
        EnableDnsHostnames=FLAG,
        EnableDnsSupport=FLAG,
        InstanceTenancy=TEXT,
        Tags=TAGS,
        required="CidrBlock",
    )
    replacing = frozenset({"CidrBlock", "InstanceTenancy"})
    attributes = frozenset({"CidrBlock", "CidrBlockAssociations", "DefaultNetworkAcl", "DefaultSecurityGroup", "VpcId"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        client = place.client("ec2")
        tenancy = properties.get("InstanceTenancy", "default")
        made: str = client.create_vpc(CidrBlock=properties["CidrBlock"], InstanceTenancy=tenancy)["Vpc"]["VpcId"]
        with undone_on_error(lambda: client.delete_vpc(VpcId=made)):
            self.update(place, made, properties, {})
        return made

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        client = place.client("ec2")
        client.modify_vpc_attribute(VpcId=physical_id, EnableDnsSupport={"Value": properties.get("EnableDnsSupport", True)})
        client.modify_vpc_attribute(VpcId=physical_id, EnableDnsHostnames={"Value": properties.get("EnableDnsHostnames", False)})
        tag_ec2(place, physical_id, properties)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("ec2").delete_vpc(VpcId=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        client = place.client("ec2")
        of_vpc = [{"Name": "vpc-id", "Values": [physical_id]}]
        if name == "VpcId":
            return physical_id
        if name == "DefaultSecurityGroup":
            groups = client.describe_security_groups(Filters=of_vpc)["SecurityGroups"]
            return next(group["GroupId"] for group in groups if group["GroupName"] == "default")
        if name == "DefaultNetworkAcl":
            lists = client.describe_network_acls(Filters=of_vpc)["NetworkAcls"]
            return next(each["NetworkAclId"] for each in lists if each["IsDefault"])
        vpc = client.describe_vpcs(VpcIds=[physical_id])["Vpcs"][0]
        if name == "CidrBlock":
            return vpc["CidrBlock"]
        return [association["AssociationId"] for association in vpc["CidrBlockAssociationSet"]]


@provides
class Subnet(Provider):
    """A subnet of a VPC."""

    type = "AWS::EC2::Subnet"
    schema = record(
        AvailabilityZone=TEXT,
        AvailabilityZoneId=TEXT,
        CidrBlock=TEXT,
        MapPublicIpOnLaunch=FLAG,
        Tags=TAGS,
        VpcId=TEXT,
        required="CidrBlock VpcId",
    )
    replacing = frozenset({"AvailabilityZone", "AvailabilityZoneId", "CidrBlock", "VpcId"})
    attributes = frozenset({"AvailabilityZone", "CidrBlock", "SubnetId", "VpcId"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        client = place.client("ec2")
        names = ("AvailabilityZone", "AvailabilityZoneId", "CidrBlock", "VpcId")
        where = {name: properties[name] for name in names if name in properties}
        made: str = client.create_subnet(**where)["Subnet"]["SubnetId"]
        with undone_on_error(lambda: client.delete_subnet(SubnetId=made)):
            self.update(place, made, properties, {})
        return made

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        public = {"Value": properties.get("MapPublicIpOnLaunch", False)}
        place.client("ec2").modify_subnet_attribute(SubnetId=physical_id, MapPublicIpOnLaunch=public)
        tag_ec2(place, physical_id, properties)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("ec2").delete_subnet(SubnetId=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return place.client("ec2").describe_subnets(SubnetIds=[physical_id])["Subnets"][0][name]


@provides
class RouteTable(Provider):
    """A table of routes."""

    type = "AWS::EC2::RouteTable"
    schema = record(Tags=TAGS, VpcId=TEXT, required="VpcId")
    replacing = frozenset({"VpcId"})
    attributes = frozenset({"RouteTableId"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        made: str = place.client("ec2").create_route_table(VpcId=properties["VpcId"])["RouteTable"]["RouteTableId"]
        tag_ec2(place, made, properties)
        return made

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        tag_ec2(place, physical_id, properties)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("ec2").delete_route_table(RouteTableId=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return physical_id


@provides
class SubnetRouteTableAssociation(Provider):
    """Which table a subnet uses."""

    type = "AWS::EC2::SubnetRouteTableAssociation"
    schema = record(RouteTableId=TEXT, SubnetId=TEXT, required="RouteTableId SubnetId")
    replacing = frozenset({"RouteTableId", "SubnetId"})
    attributes = frozenset({"Id"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        made: str = place.client("ec2").associate_route_table(**properties)["AssociationId"]
        return made

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("ec2").disassociate_route_table(AssociationId=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return physical_id


@provides
class Route(Provider):
    """A route to a gateway."""

    type = "AWS::EC2::Route"
    schema = record(
        DestinationCidrBlock=TEXT,
        GatewayId=TEXT,
        NatGatewayId=TEXT,
        RouteTableId=TEXT,
        required="DestinationCidrBlock RouteTableId",
    )
    replacing = frozenset({"DestinationCidrBlock", "RouteTableId"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        place.client("ec2").create_route(**properties)
        return f"{properties['RouteTableId']}|{properties['DestinationCidrBlock']}"

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        place.client("ec2").replace_route(**properties)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        table, destination = physical_id.split("|")
        place.client("ec2").delete_route(RouteTableId=table, DestinationCidrBlock=destination)
