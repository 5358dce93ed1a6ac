"""Auto Scaling groups."""

from __future__ import annotations

from typing import Any, ClassVar

from trainlocal.cloud.resources.api_shape import ApiShape
from trainlocal.cloud.resources.provider import Place, Provider, provides, undone_on_error
from trainlocal.cloud.resources.schema import FLAG, TEXT, TEXTS, WHOLE, Many, record
from trainlocal.cloud.signals import seconds_of, wait_for_resource_signals

_SIZES = ("MinSize", "MaxSize", "DesiredCapacity")
_TAG = record(Key=TEXT, PropagateAtLaunch=FLAG, Value=TEXT, required="Key PropagateAtLaunch Value")


@provides
class AutoScalingGroup(Provider):
    """A group of instances that keeps its size."""

    type = "AWS::AutoScaling::AutoScalingGroup"
    schema = record(
        AutoScalingGroupName=TEXT,
        AvailabilityZones=TEXTS,
        CapacityRebalance=FLAG,
        Cooldown=WHOLE,
        DesiredCapacity=WHOLE,
        HealthCheckGracePeriod=WHOLE,
        HealthCheckType=TEXT,
        LaunchTemplate=ApiShape("autoscaling", "LaunchTemplateSpecification"),
        MaxSize=WHOLE,
        MinSize=WHOLE,
        MixedInstancesPolicy=ApiShape("autoscaling", "MixedInstancesPolicy"),
        NewInstancesProtectedFromScaleIn=FLAG,
        PlacementGroup=TEXT,
        Tags=Many(_TAG),
        TerminationPolicies=TEXTS,
        VPCZoneIdentifier=TEXTS,
        required="MaxSize MinSize",
    )
    replacing = frozenset({"AutoScalingGroupName"})
    name_property = "AutoScalingGroupName"
    update_policies: ClassVar[dict[str, frozenset[str]]] = {
        "AutoScalingRollingUpdate": frozenset(
            {"MaxBatchSize", "MinInstancesInService", "MinSuccessfulInstancesPercent", "PauseTime", "WaitOnResourceSignals"}
        ),
        "AutoScalingScheduledAction": frozenset({"IgnoreUnmodifiedGroupSizeProperties"}),
    }

    creation_policies: ClassVar[dict[str, frozenset[str]]] = {"ResourceSignal": frozenset({"Count", "Timeout"})}

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        client = place.client("autoscaling")
        name = properties.get("AutoScalingGroupName") or place.name()
        request = _request(properties)
        client.create_auto_scaling_group(AutoScalingGroupName=name, Tags=_tags(place, name, properties), **request)
        with undone_on_error(lambda: self.delete(place, name, properties)):
            _check_stable(place, name)
        return name

    def settle(self, place: Place, properties: dict[str, Any]) -> None:
        if "ResourceSignal" in place.creation_policy:
            wanted = place.creation_policy["ResourceSignal"]
            seconds = seconds_of(wanted.get("Timeout", "PT5M"), where="CreationPolicy.ResourceSignal.Timeout")
            wait_for_resource_signals(place.signals, place.logical, count=int(wanted.get("Count", 1)), seconds=seconds)

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        client = place.client("autoscaling")
        request = _request(properties)
        scheduled = place.update_policy.get("AutoScalingScheduledAction", {})
        if str(scheduled.get("IgnoreUnmodifiedGroupSizeProperties", "false")).lower() == "true":
            request = {name: value for name, value in request.items() if name not in _SIZES or value != before.get(name)}
        client.update_auto_scaling_group(AutoScalingGroupName=physical_id, **request)
        self._tag(place, physical_id, properties)
        if "AutoScalingRollingUpdate" in place.update_policy and _launches_differently(properties, before):
            _replace_instances(place, physical_id)
        _check_stable(place, physical_id)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("autoscaling").delete_auto_scaling_group(AutoScalingGroupName=physical_id, ForceDelete=True)

    def _tag(self, place: Place, name: str, properties: dict[str, Any]) -> None:
        client = place.client("autoscaling")
        wanted = _tags(place, name, properties)
        keys = {tag["Key"] for tag in wanted}
        present = client.describe_tags(Filters=[{"Name": "auto-scaling-group", "Values": [name]}])["Tags"]
        stale = [{"Key": tag["Key"], **_of_group(name)} for tag in present if tag["Key"] not in keys]
        if stale:
            client.delete_tags(Tags=stale)
        client.create_or_update_tags(Tags=wanted)


@provides
class TerminationHook(Provider):
    """What a group's instances wait in before they end (`services.lifecycle` has them wait)."""

    type = "AWS::AutoScaling::LifecycleHook"
    schema = record(
        AutoScalingGroupName=TEXT,
        DefaultResult=TEXT,
        HeartbeatTimeout=WHOLE,
        LifecycleHookName=TEXT,
        LifecycleTransition=TEXT,
        required="AutoScalingGroupName LifecycleTransition",
    )
    replacing = frozenset({"AutoScalingGroupName", "LifecycleHookName"})
    name_property = "LifecycleHookName"

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        name = properties.get("LifecycleHookName") or place.name()
        self.update(place, name, properties, {})
        return name

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        place.client("autoscaling").put_lifecycle_hook(**{**properties, "LifecycleHookName": physical_id})

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        client = place.client("autoscaling")
        client.delete_lifecycle_hook(LifecycleHookName=physical_id, AutoScalingGroupName=properties["AutoScalingGroupName"])


@provides
class ScheduledAction(Provider):
    """A change of a group's size at a time that is known beforehand (`services.schedule` makes it)."""

    type = "AWS::AutoScaling::ScheduledAction"
    schema = record(
        AutoScalingGroupName=TEXT,
        DesiredCapacity=WHOLE,
        MaxSize=WHOLE,
        MinSize=WHOLE,
        StartTime=TEXT,
        required="AutoScalingGroupName StartTime",
    )
    replacing = frozenset({"AutoScalingGroupName"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        name = place.name()
        self.update(place, name, properties, {})
        return name

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        place.client("autoscaling").put_scheduled_update_group_action(ScheduledActionName=physical_id, **properties)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        client, group = place.client("autoscaling"), {"AutoScalingGroupName": properties["AutoScalingGroupName"]}
        still_to_come = client.describe_scheduled_actions(**group, ScheduledActionNames=[physical_id])[
            "ScheduledUpdateGroupActions"
        ]
        if still_to_come:  # one that was taken is gone
            client.delete_scheduled_action(**group, ScheduledActionName=physical_id)


def _request(properties: dict[str, Any]) -> dict[str, Any]:
    """The properties as the API takes them."""
    request = {name: value for name, value in properties.items() if name not in ("AutoScalingGroupName", "Tags")}
    if "VPCZoneIdentifier" in request:
        request["VPCZoneIdentifier"] = ",".join(request["VPCZoneIdentifier"])
    if "Cooldown" in request:
        request["DefaultCooldown"] = request.pop("Cooldown")
    return request


def _of_group(name: str) -> dict[str, str]:
    return {"ResourceId": name, "ResourceType": "auto-scaling-group"}


def _tags(place: Place, name: str, properties: dict[str, Any]) -> list[dict[str, Any]]:
    """The group's tags; those of the stack and of CloudFormation go on to the instances, as on AWS."""
    own = {tag["Key"]: tag for tag in properties.get("Tags", [])}
    inherited = {**place.stack_tags, **place.system_tags}
    tags = [{"Key": key, "Value": value, "PropagateAtLaunch": True} for key, value in inherited.items() if key not in own]
    return [{**tag, **_of_group(name)} for tag in [*own.values(), *tags]]


def _check_stable(place: Place, name: str) -> None:
    """Raises when the group did not reach its minimum because a launch was refused, as CloudFormation does."""
    client = place.client("autoscaling")
    group = client.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"][0]
    current = sum(instance["LifecycleState"] == "InService" for instance in group["Instances"])
    activities = client.describe_scaling_activities(AutoScalingGroupName=name, MaxRecords=1)["Activities"]
    if current < group["MinSize"] and activities and activities[0]["StatusCode"] == "Failed":
        raise ValueError(
            f"Group did not stabilize. {{current/minSize/maxSize group size = {current}/{group['MinSize']}/{group['MaxSize']}}}. "
            f"Failed Scaling Activity: {activities[0]['StatusMessage']}"
        )


def _launches_differently(properties: dict[str, Any], before: dict[str, Any]) -> bool:
    names = ("LaunchTemplate", "MixedInstancesPolicy", "PlacementGroup", "VPCZoneIdentifier")
    return any(properties.get(name) != before.get(name) for name in names)


def _replace_instances(place: Place, name: str) -> None:
    """A rolling update: the group's instances go, in batches, and the group launches new ones in their place."""
    client = place.client("autoscaling")
    policy = place.update_policy["AutoScalingRollingUpdate"]
    batch = int(policy.get("MaxBatchSize", 1))
    waits = str(policy.get("WaitOnResourceSignals", "false")).lower() == "true"
    group = client.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"][0]
    old = [instance["InstanceId"] for instance in group["Instances"] if instance["LifecycleState"] == "InService"]
    for start in range(0, len(old), batch):
        going = old[start : start + batch]
        place.signals.expect(place.logical)
        for instance in going:
            client.terminate_instance_in_auto_scaling_group(InstanceId=instance, ShouldDecrementDesiredCapacity=False)
        if waits:
            wait_for_resource_signals(
                place.signals,
                place.logical,
                count=len(going),
                seconds=seconds_of(policy.get("PauseTime", "PT5M"), where="UpdatePolicy.AutoScalingRollingUpdate.PauseTime"),
                percent=int(policy.get("MinSuccessfulInstancesPercent", 100)),
            )
