"""EC2 placement groups, which moto does not have: create, describe, delete."""

from __future__ import annotations

from typing import Any

from moto.core.responses import ActionResult, EmptyResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.responses import EC2Response
from moto.ec2.utils import EC2_PREFIX_TO_RESOURCE, EC2_RESOURCE_TO_PREFIX, generic_filter, random_id

from trainlocal.cloud.services.amending import amend

STRATEGIES = ("cluster", "partition", "spread")


class PlacementGroup(TaggedEC2Resource):
    """One group, in the form in which moto keeps and filters EC2 resources."""

    def __init__(self, backend: Any, *, name: str, strategy: str, partitions: int | None, spread: str | None) -> None:
        self.ec2_backend = backend
        self.id = random_id(prefix="pg")
        self.name = name
        self.strategy = strategy
        self.partitions = partitions
        self.spread = spread

    def describe(self) -> dict[str, Any]:
        """The group as the API shows it."""
        return {
            "GroupName": self.name,
            "GroupId": self.id,
            "GroupArn": f"arn:aws:ec2:{self.ec2_backend.region_name}:{self.ec2_backend.account_id}:placement-group/{self.name}",
            "State": "available",
            "Strategy": self.strategy,
            "PartitionCount": self.partitions,
            "SpreadLevel": self.spread,
            "Tags": [{"Key": tag["key"], "Value": tag["value"]} for tag in self.get_tags()],
        }

    def get_filter_value(self, filter_name: str, method_name: str | None = None) -> Any:
        """What moto's generic filter compares."""
        values = {"group-name": self.name, "strategy": self.strategy, "state": "available", "group-id": self.id}
        return values.get(filter_name) or super().get_filter_value(filter_name, "DescribePlacementGroups")


def placement_groups(backend: EC2Backend) -> dict[str, PlacementGroup]:
    """The groups of one region by name."""
    groups: dict[str, PlacementGroup] = backend.__dict__.setdefault("placement_groups", {})
    return groups


def install() -> None:
    """Gives moto's EC2 the three actions."""
    EC2_RESOURCE_TO_PREFIX["placement-group"] = "pg"
    EC2_PREFIX_TO_RESOURCE["pg"] = "placement-group"
    amend(EC2Response, "create_placement_group", _create)
    amend(EC2Response, "describe_placement_groups", _describe)
    amend(EC2Response, "delete_placement_group", _delete)


def _create(response: EC2Response) -> ActionResult:
    backend = response.ec2_backend
    name = response._get_param("GroupName")
    strategy = response._get_param("Strategy", "cluster")
    if strategy not in STRATEGIES:
        message = f"Invalid value '{strategy}' for strategy; use one of {', '.join(STRATEGIES)}."
        raise EC2ClientError("InvalidParameterValue", message)
    if name in placement_groups(backend):
        raise EC2ClientError("InvalidPlacementGroup.Duplicate", f"The placement group '{name}' already exists.")
    partitions = response._get_param("PartitionCount")
    if strategy == "partition":
        partitions = partitions or 2
    elif partitions:
        raise EC2ClientError("InvalidParameterCombination", "PartitionCount is valid only with the partition strategy.")
    spread = response._get_param("SpreadLevel", "rack") if strategy == "spread" else None
    group = PlacementGroup(backend, name=name, strategy=strategy, partitions=partitions, spread=spread)
    group.add_tags(response._parse_tag_specification().get("placement-group", {}))
    placement_groups(backend)[name] = group
    return ActionResult({"PlacementGroup": group.describe()})


def _describe(response: EC2Response) -> ActionResult:
    groups = list(placement_groups(response.ec2_backend).values())
    names = response._get_param("GroupNames", [])
    ids = response._get_param("GroupIds", [])
    for wanted in names:
        if wanted not in [group.name for group in groups]:
            raise unknown_placement_group(wanted)
    chosen = [group for group in groups if (not names or group.name in names) and (not ids or group.id in ids)]
    chosen = generic_filter(response._filters_from_querystring(), chosen)
    return ActionResult({"PlacementGroups": [group.describe() for group in chosen]})


def _delete(response: EC2Response) -> ActionResult:
    backend = response.ec2_backend
    name = response._get_param("GroupName")
    if name not in placement_groups(backend):
        raise unknown_placement_group(name)
    alive = [instance for instance in backend.all_instances() if instance.state != "terminated"]
    in_use = [instance.id for instance in alive if instance.placement.group_name == name]
    if in_use:
        raise EC2ClientError("InvalidPlacementGroup.InUse", f"The placement group '{name}' is in use by {', '.join(in_use)}.")
    del placement_groups(backend)[name]
    return EmptyResult()


def unknown_placement_group(name: str) -> EC2ClientError:
    """The error of EC2 for a group that does not exist."""
    return EC2ClientError("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
