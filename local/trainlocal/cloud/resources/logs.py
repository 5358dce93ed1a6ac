"""Log groups."""

from __future__ import annotations

from typing import Any

from trainlocal.cloud.resources.provider import Place, Provider, provides
from trainlocal.cloud.resources.schema import TAGS, TEXT, WHOLE, record


@provides
class LogGroup(Provider):
    """A group of log streams."""

    type = "AWS::Logs::LogGroup"
    schema = record(KmsKeyId=TEXT, LogGroupClass=TEXT, LogGroupName=TEXT, RetentionInDays=WHOLE, Tags=TAGS)
    replacing = frozenset({"KmsKeyId", "LogGroupClass", "LogGroupName"})
    attributes = frozenset({"Arn"})
    name_property = "LogGroupName"

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        name: str = properties.get("LogGroupName") or place.name()
        names = {"KmsKeyId": "kmsKeyId", "LogGroupClass": "logGroupClass"}
        request = {there: properties[here] for here, there in names.items() if here in properties}
        place.client("logs").create_log_group(logGroupName=name, **request)
        self.update(place, name, properties, {})
        return name

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        client = place.client("logs")
        if "RetentionInDays" in properties:
            client.put_retention_policy(logGroupName=physical_id, retentionInDays=properties["RetentionInDays"])
        elif "RetentionInDays" in before:
            client.delete_retention_policy(logGroupName=physical_id)
        arn = place.arn("logs", f"log-group:{physical_id}")
        wanted = place.tags(properties)
        stale = [key for key in client.list_tags_for_resource(resourceArn=arn)["tags"] if key not in wanted]
        if stale:
            client.untag_resource(resourceArn=arn, tagKeys=stale)
        if wanted:
            client.tag_resource(resourceArn=arn, tags=wanted)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("logs").delete_log_group(logGroupName=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return place.arn("logs", f"log-group:{physical_id}:*")
