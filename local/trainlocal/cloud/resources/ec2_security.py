"""Security groups and their rules."""

from __future__ import annotations

from typing import Any

from trainlocal.cloud.resources.ec2_tags import tag_ec2
from trainlocal.cloud.resources.provider import Place, Provider, provides, undone_on_error
from trainlocal.cloud.resources.schema import TAGS, TEXT, WHOLE, Kind, Many, Record, record

_RULE: dict[str, Kind] = {
    "CidrIp": TEXT,
    "CidrIpv6": TEXT,
    "Description": TEXT,
    "FromPort": WHOLE,
    "IpProtocol": TEXT,
    "ToPort": WHOLE,
}
_INGRESS = Record({**_RULE, "SourcePrefixListId": TEXT, "SourceSecurityGroupId": TEXT}, frozenset({"IpProtocol"}))
_EGRESS = Record({**_RULE, "DestinationPrefixListId": TEXT, "DestinationSecurityGroupId": TEXT}, frozenset({"IpProtocol"}))
_EVERYWHERE = {"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}


def _permission(rule: dict[str, Any]) -> dict[str, Any]:
    """A rule in the form of the EC2 API."""
    note = {"Description": rule["Description"]} if "Description" in rule else {}
    permission: dict[str, Any] = {name: rule[name] for name in ("IpProtocol", "FromPort", "ToPort") if name in rule}
    if "CidrIp" in rule:
        permission["IpRanges"] = [{"CidrIp": rule["CidrIp"], **note}]
    if "CidrIpv6" in rule:
        permission["Ipv6Ranges"] = [{"CidrIpv6": rule["CidrIpv6"], **note}]
    for name in ("SourceSecurityGroupId", "DestinationSecurityGroupId"):
        if name in rule:
            permission["UserIdGroupPairs"] = [{"GroupId": rule[name], **note}]
    for name in ("SourcePrefixListId", "DestinationPrefixListId"):
        if name in rule:
            permission["PrefixListIds"] = [{"PrefixListId": rule[name], **note}]
    return permission


@provides
class SecurityGroup(Provider):
    """A set of rules for interfaces."""

    type = "AWS::EC2::SecurityGroup"
    schema = record(
        GroupDescription=TEXT,
        GroupName=TEXT,
        SecurityGroupEgress=Many(_EGRESS),
        SecurityGroupIngress=Many(_INGRESS),
        Tags=TAGS,
        VpcId=TEXT,
        required="GroupDescription",
    )
    replacing = frozenset({"GroupDescription", "GroupName", "VpcId"})
    attributes = frozenset({"GroupId", "VpcId"})
    name_property = "GroupName"

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        client = place.client("ec2")
        vpc = {"VpcId": properties["VpcId"]} if "VpcId" in properties else {}
        name = properties.get("GroupName") or place.name()
        made: str = client.create_security_group(GroupName=name, Description=properties["GroupDescription"], **vpc)["GroupId"]
        with undone_on_error(lambda: client.delete_security_group(GroupId=made)):
            if properties.get("SecurityGroupEgress"):
                # Rules of one's own take the place of the one that lets everything out.
                client.revoke_security_group_egress(GroupId=made, IpPermissions=[_EVERYWHERE])
            self.update(place, made, properties, {})
        return made

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        client = place.client("ec2")
        for name, authorize, revoke in (
            ("SecurityGroupIngress", client.authorize_security_group_ingress, client.revoke_security_group_ingress),
            ("SecurityGroupEgress", client.authorize_security_group_egress, client.revoke_security_group_egress),
        ):
            now, was = properties.get(name, []), before.get(name, [])
            for rule in was:
                if rule not in now:
                    revoke(GroupId=physical_id, IpPermissions=[_permission(rule)])
            for rule in now:
                if rule not in was:
                    authorize(GroupId=physical_id, IpPermissions=[_permission(rule)])
        tag_ec2(place, physical_id, properties)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("ec2").delete_security_group(GroupId=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        if name == "GroupId":
            return physical_id
        return place.client("ec2").describe_security_groups(GroupIds=[physical_id])["SecurityGroups"][0]["VpcId"]


class _Rule(Provider):
    """A rule that stands by itself, so that groups may name each other or themselves."""

    direction: str
    attributes = frozenset({"Id"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        authorize = getattr(place.client("ec2"), f"authorize_security_group_{self.direction}")
        answer = authorize(GroupId=properties["GroupId"], IpPermissions=[_permission(properties)])
        made: str = answer["SecurityGroupRules"][0]["SecurityGroupRuleId"]
        return made

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        revoke = getattr(place.client("ec2"), f"revoke_security_group_{self.direction}")
        revoke(GroupId=properties["GroupId"], SecurityGroupRuleIds=[physical_id])

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return physical_id


def _with_group(rule: Record) -> Record:
    return Record({**rule.fields, "GroupId": TEXT}, rule.required | {"GroupId"})


@provides
class SecurityGroupIngress(_Rule):
    """What may come in."""

    type = "AWS::EC2::SecurityGroupIngress"
    schema = _with_group(_INGRESS)
    replacing = frozenset(schema.fields)
    direction = "ingress"


@provides
class SecurityGroupEgress(_Rule):
    """What may go out."""

    type = "AWS::EC2::SecurityGroupEgress"
    schema = _with_group(_EGRESS)
    replacing = frozenset(schema.fields)
    direction = "egress"
