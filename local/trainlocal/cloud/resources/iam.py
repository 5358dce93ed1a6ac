"""IAM roles, policies and instance profiles. Nothing is enforced: moto lets everyone do everything."""

from __future__ import annotations

import json
from typing import Any

from trainlocal.cloud.resources.provider import Place, Provider, provides, undone_on_error
from trainlocal.cloud.resources.schema import DOCUMENT, TAGS, TEXT, TEXTS, WHOLE, Many, record

_INLINE = record(PolicyDocument=DOCUMENT, PolicyName=TEXT, required="PolicyDocument PolicyName")


def _inline(properties: dict[str, Any]) -> dict[str, str]:
    return {policy["PolicyName"]: json.dumps(policy["PolicyDocument"]) for policy in properties.get("Policies", [])}


@provides
class Role(Provider):
    """An identity that services take on."""

    type = "AWS::IAM::Role"
    schema = record(
        AssumeRolePolicyDocument=DOCUMENT,
        Description=TEXT,
        ManagedPolicyArns=TEXTS,
        MaxSessionDuration=WHOLE,
        Path=TEXT,
        PermissionsBoundary=TEXT,
        Policies=Many(_INLINE),
        RoleName=TEXT,
        Tags=TAGS,
        required="AssumeRolePolicyDocument",
    )
    replacing = frozenset({"Path", "RoleName"})
    attributes = frozenset({"Arn", "RoleId"})
    name_property = "RoleName"
    makes_identities = True

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        client = place.client("iam")
        name = properties.get("RoleName") or place.name(limit=64)
        plain = ("Description", "MaxSessionDuration", "Path", "PermissionsBoundary")
        request = {key: properties[key] for key in plain if key in properties}
        client.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(properties["AssumeRolePolicyDocument"]), **request)
        with undone_on_error(lambda: self.delete(place, name, properties)):
            self._attach(place, name, properties, {})
        return name

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        client = place.client("iam")
        trust = properties["AssumeRolePolicyDocument"]
        if trust != before["AssumeRolePolicyDocument"]:
            client.update_assume_role_policy(RoleName=physical_id, PolicyDocument=json.dumps(trust))
        client.update_role(
            RoleName=physical_id,
            Description=properties.get("Description", ""),
            MaxSessionDuration=properties.get("MaxSessionDuration", 3600),
        )
        if "PermissionsBoundary" in properties:
            client.put_role_permissions_boundary(RoleName=physical_id, PermissionsBoundary=properties["PermissionsBoundary"])
        elif "PermissionsBoundary" in before:
            client.delete_role_permissions_boundary(RoleName=physical_id)
        self._attach(place, physical_id, properties, before)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        client = place.client("iam")
        for policy in client.list_attached_role_policies(RoleName=physical_id)["AttachedPolicies"]:
            client.detach_role_policy(RoleName=physical_id, PolicyArn=policy["PolicyArn"])
        for name in client.list_role_policies(RoleName=physical_id)["PolicyNames"]:
            client.delete_role_policy(RoleName=physical_id, PolicyName=name)
        client.delete_role(RoleName=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return place.client("iam").get_role(RoleName=physical_id)["Role"][name]

    def _attach(self, place: Place, name: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        """Brings policies and tags from what they were to what they are to be."""
        client = place.client("iam")
        managed, managed_before = set(properties.get("ManagedPolicyArns", [])), set(before.get("ManagedPolicyArns", []))
        for arn in sorted(managed_before - managed):
            client.detach_role_policy(RoleName=name, PolicyArn=arn)
        for arn in sorted(managed - managed_before):
            client.attach_role_policy(RoleName=name, PolicyArn=arn)
        for policy in _inline(before).keys() - _inline(properties).keys():
            client.delete_role_policy(RoleName=name, PolicyName=policy)
        for policy, document in _inline(properties).items():
            client.put_role_policy(RoleName=name, PolicyName=policy, PolicyDocument=document)
        wanted = place.tags(properties)
        stale = [tag["Key"] for tag in client.list_role_tags(RoleName=name)["Tags"] if tag["Key"] not in wanted]
        if stale:
            client.untag_role(RoleName=name, TagKeys=stale)
        if wanted:
            client.tag_role(RoleName=name, Tags=[{"Key": key, "Value": value} for key, value in wanted.items()])


@provides
class Policy(Provider):
    """A policy written into roles."""

    type = "AWS::IAM::Policy"
    schema = record(PolicyDocument=DOCUMENT, PolicyName=TEXT, Roles=TEXTS, required="PolicyDocument PolicyName Roles")
    replacing = frozenset({"PolicyName"})
    makes_identities = True

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        self.update(place, "", properties, {})
        return place.name()

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        client = place.client("iam")
        for role in set(before.get("Roles", [])) - set(properties["Roles"]):
            client.delete_role_policy(RoleName=role, PolicyName=properties["PolicyName"])
        document = json.dumps(properties["PolicyDocument"])
        for role in properties["Roles"]:
            client.put_role_policy(RoleName=role, PolicyName=properties["PolicyName"], PolicyDocument=document)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        for role in properties["Roles"]:
            place.client("iam").delete_role_policy(RoleName=role, PolicyName=properties["PolicyName"])


@provides
class ManagedPolicy(Provider):
    """A policy that stands by itself."""

    type = "AWS::IAM::ManagedPolicy"
    schema = record(
        Description=TEXT, ManagedPolicyName=TEXT, Path=TEXT, PolicyDocument=DOCUMENT, Roles=TEXTS, required="PolicyDocument"
    )
    replacing = frozenset({"Description", "ManagedPolicyName", "Path"})
    attributes = frozenset({"PolicyArn"})
    name_property = "ManagedPolicyName"
    makes_identities = True

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        client = place.client("iam")
        request = {key: properties[key] for key in ("Description", "Path") if key in properties}
        made: str = client.create_policy(
            PolicyName=properties.get("ManagedPolicyName") or place.name(limit=128),
            PolicyDocument=json.dumps(properties["PolicyDocument"]),
            **request,
        )["Policy"]["Arn"]
        for role in properties.get("Roles", []):
            client.attach_role_policy(RoleName=role, PolicyArn=made)
        return made

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        client = place.client("iam")
        if properties["PolicyDocument"] != before["PolicyDocument"]:
            self._drop_old_versions(place, physical_id)
            document = json.dumps(properties["PolicyDocument"])
            client.create_policy_version(PolicyArn=physical_id, PolicyDocument=document, SetAsDefault=True)
        roles, roles_before = set(properties.get("Roles", [])), set(before.get("Roles", []))
        for role in roles_before - roles:
            client.detach_role_policy(RoleName=role, PolicyArn=physical_id)
        for role in roles - roles_before:
            client.attach_role_policy(RoleName=role, PolicyArn=physical_id)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        client = place.client("iam")
        for role in properties.get("Roles", []):
            client.detach_role_policy(RoleName=role, PolicyArn=physical_id)
        self._drop_old_versions(place, physical_id)
        client.delete_policy(PolicyArn=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return physical_id

    def _drop_old_versions(self, place: Place, arn: str) -> None:
        client = place.client("iam")
        for version in client.list_policy_versions(PolicyArn=arn)["Versions"]:
            if not version["IsDefaultVersion"]:
                client.delete_policy_version(PolicyArn=arn, VersionId=version["VersionId"])


@provides
class InstanceProfile(Provider):
    """What gives an instance its role."""

    type = "AWS::IAM::InstanceProfile"
    schema = record(InstanceProfileName=TEXT, Path=TEXT, Roles=TEXTS, required="Roles")
    replacing = frozenset({"InstanceProfileName", "Path"})
    attributes = frozenset({"Arn"})
    name_property = "InstanceProfileName"
    makes_identities = True

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        client = place.client("iam")
        name: str = properties.get("InstanceProfileName") or place.name(limit=128)
        client.create_instance_profile(InstanceProfileName=name, Path=properties.get("Path", "/"))
        with undone_on_error(lambda: client.delete_instance_profile(InstanceProfileName=name)):
            self.update(place, name, properties, {})
        return name

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        client = place.client("iam")
        for role in set(before.get("Roles", [])) - set(properties["Roles"]):
            client.remove_role_from_instance_profile(InstanceProfileName=physical_id, RoleName=role)
        for role in set(properties["Roles"]) - set(before.get("Roles", [])):
            client.add_role_to_instance_profile(InstanceProfileName=physical_id, RoleName=role)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        client = place.client("iam")
        for role in properties["Roles"]:
            client.remove_role_from_instance_profile(InstanceProfileName=physical_id, RoleName=role)
        client.delete_instance_profile(InstanceProfileName=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return place.client("iam").get_instance_profile(InstanceProfileName=physical_id)["InstanceProfile"]["Arn"]
