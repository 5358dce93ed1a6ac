"""Launch templates and placement groups."""

from __future__ import annotations

from typing import Any

from trainlocal.cloud.resources.api_shape import ApiShape
from trainlocal.cloud.resources.ec2_tags import tag_ec2
from trainlocal.cloud.resources.provider import Place, Provider, provides
from trainlocal.cloud.resources.schema import TAGS, TEXT, WHOLE, Many, record


@provides
class LaunchTemplate(Provider):
    """What an instance is launched from; each change makes a new version of it."""

    type = "AWS::EC2::LaunchTemplate"
    schema = record(
        LaunchTemplateData=ApiShape("ec2", "RequestLaunchTemplateData"),
        LaunchTemplateName=TEXT,
        TagSpecifications=Many(record(ResourceType=TEXT, Tags=TAGS, required="ResourceType Tags")),
        VersionDescription=TEXT,
        required="LaunchTemplateData",
    )
    replacing = frozenset({"LaunchTemplateName", "TagSpecifications"})
    attributes = frozenset({"DefaultVersionNumber", "LatestVersionNumber", "LaunchTemplateId"})
    volatile = frozenset({"LatestVersionNumber"})
    name_property = "LaunchTemplateName"

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        answer = place.client("ec2").create_launch_template(
            LaunchTemplateName=properties.get("LaunchTemplateName") or place.name(limit=128), **self._version(properties)
        )
        made: str = answer["LaunchTemplate"]["LaunchTemplateId"]
        own = [tag for each in properties.get("TagSpecifications", []) for tag in each["Tags"]]
        tag_ec2(place, made, {"Tags": own})
        return made

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        place.client("ec2").create_launch_template_version(LaunchTemplateId=physical_id, **self._version(properties))

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("ec2").delete_launch_template(LaunchTemplateId=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        template = place.client("ec2").describe_launch_templates(LaunchTemplateIds=[physical_id])["LaunchTemplates"][0]
        return str(template[name])

    def _version(self, properties: dict[str, Any]) -> dict[str, Any]:
        return {name: properties[name] for name in ("LaunchTemplateData", "VersionDescription") if name in properties}


@provides
class PlacementGroup(Provider):
    """How instances lie to each other."""

    type = "AWS::EC2::PlacementGroup"
    schema = record(PartitionCount=WHOLE, SpreadLevel=TEXT, Strategy=TEXT, Tags=TAGS)
    replacing = frozenset({"PartitionCount", "SpreadLevel", "Strategy"})
    attributes = frozenset({"GroupName"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        name = place.name()
        how = {key: value for key, value in properties.items() if key != "Tags"}
        place.client("ec2").create_placement_group(GroupName=name, **how)
        self.update(place, name, properties, {})
        return name

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        group = place.client("ec2").describe_placement_groups(GroupNames=[physical_id])["PlacementGroups"][0]
        tag_ec2(place, group["GroupId"], properties)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("ec2").delete_placement_group(GroupName=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return physical_id
