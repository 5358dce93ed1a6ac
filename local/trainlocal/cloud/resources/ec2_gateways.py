"""Internet gateways, elastic addresses and NAT gateways."""

from __future__ import annotations

from typing import Any

from trainlocal.cloud.resources.ec2_tags import tag_ec2
from trainlocal.cloud.resources.provider import Place, Provider, provides
from trainlocal.cloud.resources.schema import TAGS, TEXT, record


@provides
class InternetGateway(Provider):
    """A way to the internet."""

    type = "AWS::EC2::InternetGateway"
    schema = record(Tags=TAGS)
    attributes = frozenset({"InternetGatewayId"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        made: str = place.client("ec2").create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
        tag_ec2(place, made, properties)
        return made

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        tag_ec2(place, physical_id, properties)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("ec2").delete_internet_gateway(InternetGatewayId=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return physical_id


@provides
class VpcGatewayAttachment(Provider):
    """An internet gateway's tie to a VPC."""

    type = "AWS::EC2::VPCGatewayAttachment"
    schema = record(InternetGatewayId=TEXT, VpcId=TEXT, required="InternetGatewayId VpcId")
    replacing = frozenset({"InternetGatewayId", "VpcId"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        place.client("ec2").attach_internet_gateway(**properties)
        return f"IGW|{properties['VpcId']}"

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("ec2").detach_internet_gateway(**properties)


@provides
class ElasticAddress(Provider):
    """A public address that stays."""

    type = "AWS::EC2::EIP"
    schema = record(Domain=TEXT, Tags=TAGS)
    replacing = frozenset({"Domain"})
    attributes = frozenset({"AllocationId", "PublicIp"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        address = place.client("ec2").allocate_address(Domain=properties.get("Domain", "vpc"))
        tag_ec2(place, address["AllocationId"], properties)
        public: str = address["PublicIp"]
        return public

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        tag_ec2(place, self._allocation(place, physical_id), properties)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("ec2").release_address(AllocationId=self._allocation(place, physical_id))

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return physical_id if name == "PublicIp" else self._allocation(place, physical_id)

    def _allocation(self, place: Place, address: str) -> str:
        allocation: str = place.client("ec2").describe_addresses(PublicIps=[address])["Addresses"][0]["AllocationId"]
        return allocation


@provides
class NatGateway(Provider):
    """Outbound access for private subnets."""

    type = "AWS::EC2::NatGateway"
    schema = record(AllocationId=TEXT, ConnectivityType=TEXT, SubnetId=TEXT, Tags=TAGS, required="SubnetId")
    replacing = frozenset({"AllocationId", "ConnectivityType", "SubnetId"})
    attributes = frozenset({"NatGatewayId"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        request = {name: value for name, value in properties.items() if name != "Tags"}
        made: str = place.client("ec2").create_nat_gateway(**request)["NatGateway"]["NatGatewayId"]
        tag_ec2(place, made, properties)
        return made

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        tag_ec2(place, physical_id, properties)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("ec2").delete_nat_gateway(NatGatewayId=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return physical_id
