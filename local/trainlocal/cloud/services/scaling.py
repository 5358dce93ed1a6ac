"""The scaling activities of Auto Scaling groups, which moto does not record, and the bounds of their capacity."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from uuid import uuid4

from moto.autoscaling.exceptions import ValidationError
from moto.autoscaling.models import AutoScalingBackend, FakeAutoScalingGroup
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import ActionResult
from moto.core.utils import utcnow

from trainlocal.cloud.services.amending import amend

_set_capacity = FakeAutoScalingGroup.set_desired_capacity
_update_group = FakeAutoScalingGroup.update
_replace_terminated = AutoScalingBackend.notify_terminate_instances
_delete_group = AutoScalingBackend.delete_auto_scaling_group


def install() -> None:
    """Records what groups do and holds them to their bounds."""
    amend(AutoScalingResponse, "describe_scaling_activities", _describe_activities)
    amend(FakeAutoScalingGroup, "set_desired_capacity", _set_capacity_within_bounds)
    amend(FakeAutoScalingGroup, "update", _update_whole_group)
    amend(AutoScalingBackend, "notify_terminate_instances", _notify_terminate_instances)
    amend(AutoScalingBackend, "delete_auto_scaling_group", _delete_whole_group)


def activities(backend: AutoScalingBackend) -> list[dict[str, Any]]:
    """All activities of a region, the newest first."""
    recorded: list[dict[str, Any]] = backend.__dict__.setdefault("scaling_activities", [])
    return recorded


def record_activity(
    group: FakeAutoScalingGroup,
    description: str,
    *,
    status: str = "Successful",
    message: str | None = None,
    cause: str | None = None,
) -> None:
    """Adds one finished activity of a group."""
    now = utcnow()
    capacity = (
        f"the difference between desired and actual capacity was found, the desired capacity being {group.desired_capacity}"
    )
    activity = {
        "ActivityId": str(uuid4()),
        "AutoScalingGroupName": group.name,
        "AutoScalingGroupARN": group.arn,
        "Description": description,
        "Cause": f"At {now:%Y-%m-%dT%H:%M:%SZ} {cause or capacity}.",
        "StartTime": now,
        "EndTime": now,
        "StatusCode": status,
        "StatusMessage": message,
        "Progress": 100,
    }
    activities(group.autoscaling_backend).insert(0, activity)


def _describe_activities(response: AutoScalingResponse) -> ActionResult:
    name = response._get_param("AutoScalingGroupName")
    ids = response._get_param("ActivityIds", [])
    chosen = [
        activity
        for activity in activities(response.autoscaling_backend)
        if name in (None, activity["AutoScalingGroupName"]) and (not ids or activity["ActivityId"] in ids)
    ]
    return ActionResult({"Activities": chosen[: int(response._get_param("MaxRecords", 100))]})


def _recording_terminations(change: Callable[..., None]) -> Callable[..., None]:
    """Records as an activity each instance that a change of a group terminated."""

    @wraps(change)
    def recorded(group: FakeAutoScalingGroup, *arguments: Any, **options: Any) -> None:
        before = [state.instance for state in group.instance_states] if hasattr(group, "instance_states") else []
        change(group, *arguments, **options)
        for instance in before:
            if instance.state == "terminated":
                record_activity(group, f"Terminating EC2 instance: {instance.id}", cause="the desired capacity was lowered")

    return recorded


@_recording_terminations
def _set_capacity_within_bounds(group: FakeAutoScalingGroup, new_capacity: int | None) -> None:
    if new_capacity is not None:
        if new_capacity > int(group.max_size or 0):
            raise ValidationError(
                f"New SetDesiredCapacity value {new_capacity} is above max value {group.max_size} for the AutoScalingGroup."
            )
        if new_capacity < int(group.min_size or 0):
            raise ValidationError(
                f"New SetDesiredCapacity value {new_capacity} is below min value {group.min_size} for the AutoScalingGroup."
            )
    _set_capacity(group, new_capacity)


def _update_whole_group(group: FakeAutoScalingGroup, **changes: Any) -> None:
    """moto drops the policy of a group with mixed instances at each update that does not repeat it."""
    if not changes.get("mixed_instances_policy") and not changes.get("launch_template"):
        changes["mixed_instances_policy"] = group.mixed_instances_policy
    _update_group(group, **changes)


def _delete_whole_group(backend: AutoScalingBackend, group_name: str) -> None:
    """Deletes a group with its instances, whatever its minimum."""
    group = backend.autoscaling_groups.get(group_name)
    if group is not None:
        group.min_size = 0
        for state in group.instance_states:
            state.protected_from_scale_in = False
    _delete_group(backend, group_name)


def _notify_terminate_instances(backend: AutoScalingBackend, instance_ids: list[str]) -> None:
    for group in backend.autoscaling_groups.values():
        for state in group.instance_states:
            if state.instance.id in instance_ids:
                cause = f"instance {state.instance.id} was taken out of service: an EC2 health check found it terminated"
                record_activity(group, f"Terminating EC2 instance: {state.instance.id}", cause=cause)
    _replace_terminated(backend, instance_ids)
