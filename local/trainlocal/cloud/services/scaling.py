"""The size of Auto Scaling groups: its bounds, and how it is lowered."""

from __future__ import annotations

from typing import Any

from moto.autoscaling.exceptions import ValidationError
from moto.autoscaling.models import AutoScalingBackend, FakeAutoScalingGroup

from trainlocal.cloud.services.activities import record_activity
from trainlocal.cloud.services.amending import amend
from trainlocal.cloud.services.lifecycle import leave, release_all

_set_capacity = FakeAutoScalingGroup.set_desired_capacity
_update_group = FakeAutoScalingGroup.update
_replace_terminated = AutoScalingBackend.notify_terminate_instances
_delete_group = AutoScalingBackend.delete_auto_scaling_group


def install() -> None:
    """Holds groups to their bounds, and has them end instances as they end them on AWS."""
    amend(FakeAutoScalingGroup, "set_desired_capacity", _set_capacity_within_bounds)
    amend(FakeAutoScalingGroup, "update", _update_whole_group)
    amend(AutoScalingBackend, "notify_terminate_instances", _notify_terminate_instances)
    amend(AutoScalingBackend, "delete_auto_scaling_group", _delete_whole_group)


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
    active = group.active_instances() if hasattr(group, "instance_states") else []
    surplus = len(active) - int((group.min_size if new_capacity is None else new_capacity) or 0)
    if surplus <= 0:
        _set_capacity(group, new_capacity)
        return
    group.desired_capacity = group.min_size if new_capacity is None else new_capacity
    for state in [state for state in active if not state.protected_from_scale_in][:surplus]:
        leave(group, state, cause="the desired capacity was lowered")


def _update_whole_group(group: FakeAutoScalingGroup, **changes: Any) -> None:
    """moto drops the policy of a group with mixed instances at each update that does not repeat it."""
    if not changes.get("mixed_instances_policy") and not changes.get("launch_template"):
        changes["mixed_instances_policy"] = group.mixed_instances_policy
    _update_group(group, **changes)


def _delete_whole_group(backend: AutoScalingBackend, group_name: str) -> None:
    """Deletes a group with its instances, whatever its minimum, and with its hooks, for which nothing waits any more."""
    group = backend.autoscaling_groups.get(group_name)
    if group is not None:
        group.min_size = 0
        for hook in backend.describe_lifecycle_hooks(group_name):
            backend.delete_lifecycle_hook(group_name, hook.name)
        release_all(group)
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
