"""The tags of EC2 resources that a stack makes."""

from __future__ import annotations

from typing import Any

from trainlocal.cloud.resources.provider import Place


def tag_ec2(place: Place, resource_id: str, properties: dict[str, Any]) -> None:
    """Gives an EC2 resource exactly its own tags, those of the stack, and the system's."""
    client = place.client("ec2")
    wanted = {**place.tags(properties), **place.system_tags}
    present = client.describe_tags(Filters=[{"Name": "resource-id", "Values": [resource_id]}])["Tags"]
    stale = [{"Key": tag["Key"]} for tag in present if tag["Key"] not in wanted]
    if stale:
        client.delete_tags(Resources=[resource_id], Tags=stale)
    client.create_tags(Resources=[resource_id], Tags=[{"Key": key, "Value": value} for key, value in wanted.items()])
