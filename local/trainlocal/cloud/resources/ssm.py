"""Parameters of the SSM parameter store."""

from __future__ import annotations

from typing import Any

from trainlocal.cloud.resources.provider import Place, Provider, provides
from trainlocal.cloud.resources.schema import TEXT, Named, record


@provides
class Parameter(Provider):
    """A parameter. Its tags are a map, unlike those of most types."""

    type = "AWS::SSM::Parameter"
    schema = record(
        AllowedPattern=TEXT,
        DataType=TEXT,
        Description=TEXT,
        Name=TEXT,
        Tags=Named(TEXT),
        Tier=TEXT,
        Type=TEXT,
        Value=TEXT,
        required="Type Value",
    )
    replacing = frozenset({"DataType", "Name"})
    attributes = frozenset({"Type", "Value"})
    name_property = "Name"

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        name: str = properties.get("Name") or place.name()
        self._put(place, name, properties, overwrite=False)
        return name

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        self._put(place, physical_id, properties, overwrite=True)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("ssm").delete_parameter(Name=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return place.client("ssm").get_parameter(Name=physical_id)["Parameter"][name]

    def _put(self, place: Place, name: str, properties: dict[str, Any], *, overwrite: bool) -> None:
        client = place.client("ssm")
        request = {key: value for key, value in properties.items() if key not in ("Name", "Tags")}
        client.put_parameter(Name=name, Overwrite=overwrite, **request)
        wanted = place.tags(properties)
        present = client.list_tags_for_resource(ResourceType="Parameter", ResourceId=name)["TagList"]
        stale = [tag["Key"] for tag in present if tag["Key"] not in wanted]
        if stale:
            client.remove_tags_from_resource(ResourceType="Parameter", ResourceId=name, TagKeys=stale)
        if wanted:
            tags = [{"Key": key, "Value": value} for key, value in wanted.items()]
            client.add_tags_to_resource(ResourceType="Parameter", ResourceId=name, Tags=tags)
