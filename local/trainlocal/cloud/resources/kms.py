"""Keys and their aliases."""

from __future__ import annotations

import json
from typing import Any

from trainlocal.cloud.resources.provider import Place, Provider, provides
from trainlocal.cloud.resources.schema import DOCUMENT, FLAG, TAGS, TEXT, WHOLE, record


@provides
class Key(Provider):
    """A key."""

    type = "AWS::KMS::Key"
    schema = record(
        Description=TEXT,
        Enabled=FLAG,
        EnableKeyRotation=FLAG,
        KeyPolicy=DOCUMENT,
        KeySpec=TEXT,
        KeyUsage=TEXT,
        PendingWindowInDays=WHOLE,
        Tags=TAGS,
    )
    replacing = frozenset({"KeySpec", "KeyUsage"})
    attributes = frozenset({"Arn", "KeyId"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        client = place.client("kms")
        request: dict[str, Any] = {
            name: properties[name] for name in ("Description", "KeySpec", "KeyUsage") if name in properties
        }
        if "KeyPolicy" in properties:
            request["Policy"] = json.dumps(properties["KeyPolicy"])
        made: str = client.create_key(**request)["KeyMetadata"]["KeyId"]
        self._set(place, made, properties)
        return made

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        client = place.client("kms")
        client.update_key_description(KeyId=physical_id, Description=properties.get("Description", ""))
        if "KeyPolicy" in properties:
            client.put_key_policy(KeyId=physical_id, PolicyName="default", Policy=json.dumps(properties["KeyPolicy"]))
        self._set(place, physical_id, properties)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        days = properties.get("PendingWindowInDays", 30)
        place.client("kms").schedule_key_deletion(KeyId=physical_id, PendingWindowInDays=days)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return physical_id if name == "KeyId" else place.arn("kms", f"key/{physical_id}")

    def _set(self, place: Place, key: str, properties: dict[str, Any]) -> None:
        client = place.client("kms")
        (client.enable_key_rotation if properties.get("EnableKeyRotation") else client.disable_key_rotation)(KeyId=key)
        (client.enable_key if properties.get("Enabled", True) else client.disable_key)(KeyId=key)
        wanted = place.tags(properties)
        present = client.list_resource_tags(KeyId=key)["Tags"]
        stale = [tag["TagKey"] for tag in present if tag["TagKey"] not in wanted]
        if stale:
            client.untag_resource(KeyId=key, TagKeys=stale)
        if wanted:
            client.tag_resource(KeyId=key, Tags=[{"TagKey": name, "TagValue": value} for name, value in wanted.items()])


@provides
class Alias(Provider):
    """Another name of a key."""

    type = "AWS::KMS::Alias"
    schema = record(AliasName=TEXT, TargetKeyId=TEXT, required="AliasName TargetKeyId")
    replacing = frozenset({"AliasName"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        place.client("kms").create_alias(**properties)
        name: str = properties["AliasName"]
        return name

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        place.client("kms").update_alias(**properties)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("kms").delete_alias(AliasName=physical_id)
