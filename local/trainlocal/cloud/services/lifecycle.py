"""How instances leave their Auto Scaling group: scaled in, ended by request, or replaced as unhealthy; each through the group's
lifecycle hook, if it has one for terminations.

moto records hooks and waits for none, ends an instance by detaching it, and takes note of health without acting on it. Here an
instance that is to go is in "Terminating:Wait" until its action is completed or the heartbeat is over; it counts for nothing in
the group then, which replaces it at once. Source: EC2 Auto Scaling User Guide, "How lifecycle hooks work".
"""

from __future__ import annotations

import threading
from typing import Any

from moto.autoscaling.exceptions import ValidationError
from moto.autoscaling.models import (
    AutoScalingBackend,
    FakeAutoScalingGroup,
    InstanceState,
    LifecycleHook,
    TerminateInstanceActivity,
)
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import EmptyResult

from trainlocal.cloud.services.activities import record_activity
from trainlocal.cloud.services.amending import amend

TERMINATING = "autoscaling:EC2_INSTANCE_TERMINATING"
WAITING = "Terminating:Wait"
SHORTEST_HEARTBEAT, LONGEST_HEARTBEAT = 30, 7200

_put_hook = AutoScalingBackend.create_lifecycle_hook
_forget_hook = AutoScalingBackend.delete_lifecycle_hook


def install() -> None:
    """Has instances wait in their group's hook, and groups act on what they are told of their instances."""
    amend(AutoScalingBackend, "create_lifecycle_hook", _checked_hook)
    amend(AutoScalingBackend, "delete_lifecycle_hook", _delete_hook)
    amend(AutoScalingBackend, "terminate_instance", _terminate_instance)
    amend(AutoScalingBackend, "set_instance_health", _set_instance_health)
    amend(AutoScalingResponse, "complete_lifecycle_action", _complete)
    amend(AutoScalingResponse, "record_lifecycle_action_heartbeat", _record_heartbeat)


def leave(group: FakeAutoScalingGroup, state: InstanceState, *, cause: str) -> None:
    """Ends an instance of a group, after its hook if there is one."""
    hook = _termination_hook(group)
    if hook is None:
        _end(group, state, cause)
        return
    state.lifecycle_state = WAITING
    _wait(group, state, hook, cause)


def release_all(group: FakeAutoScalingGroup) -> None:
    """Ends all instances of a group that wait in a hook."""
    for state in [state for state in group.instance_states if state.lifecycle_state == WAITING]:
        _release(group, state)


def _checked_hook(
    backend: AutoScalingBackend, name: str, as_name: str, transition: str, timeout: int | None, result: str
) -> LifecycleHook:
    if as_name not in backend.autoscaling_groups:
        raise ValidationError(f"AutoScalingGroup name not found - AutoScalingGroup '{as_name}' not found")
    if transition != TERMINATING:
        raise ValidationError(f"Only lifecycle hooks of {TERMINATING} are emulated, not of {transition}.")
    if timeout is not None and not SHORTEST_HEARTBEAT <= timeout <= LONGEST_HEARTBEAT:
        raise ValidationError(f"The heartbeat timeout must be between {SHORTEST_HEARTBEAT} and {LONGEST_HEARTBEAT} seconds.")
    return _put_hook(backend, name, as_name, transition, timeout, result)


def _delete_hook(backend: AutoScalingBackend, as_name: str, name: str) -> None:
    """Who waits in it goes on."""
    _forget_hook(backend, as_name, name)
    group = backend.autoscaling_groups.get(as_name)
    if group is not None:
        release_all(group)


def _terminate_instance(backend: AutoScalingBackend, instance_id: str, should_decrement: bool) -> TerminateInstanceActivity:
    group, state = _member(backend, instance_id)
    before = int(group.desired_capacity or 0)
    if should_decrement and before <= int(group.min_size or 0):
        raise ValidationError(
            f"Currently, desiredSize equals minSize ({group.min_size}). Terminating instance without replacement will violate "
            "group's min size constraint. Either set shouldDecrementDesiredCapacity flag to false or lower group's min size."
        )
    if state.lifecycle_state != WAITING:
        if should_decrement:
            group.desired_capacity = before - 1
        leave(group, state, cause=f"instance {instance_id} was taken out of service in response to a user request")
        group.set_desired_capacity(group.desired_capacity)  # which launches what is missing now
    return TerminateInstanceActivity(state.instance, before)


def _set_instance_health(backend: AutoScalingBackend, instance_id: str, health_status: str) -> None:
    group, state = _member(backend, instance_id)
    state.health_status = health_status
    if health_status == "Unhealthy" and state.lifecycle_state == "InService":
        leave(group, state, cause=f"instance {instance_id} was taken out of service: it was set unhealthy by its user")
        group.set_desired_capacity(group.desired_capacity)


def _complete(response: AutoScalingResponse) -> EmptyResult:
    group, state = _waiting(response)
    if response._get_param("LifecycleActionResult") not in ("CONTINUE", "ABANDON"):
        raise ValidationError("The lifecycle action result must be CONTINUE or ABANDON.")
    _release(group, state)
    return EmptyResult()


def _record_heartbeat(response: AutoScalingResponse) -> EmptyResult:
    group, state = _waiting(response)
    hook = _termination_hook(group)
    assert hook is not None, "who waits, waits in a hook"
    _wait(group, state, hook, state.__dict__["leaving_because"])
    return EmptyResult()


def _waiting(response: AutoScalingResponse) -> tuple[FakeAutoScalingGroup, InstanceState]:
    """The instance of which a request about a lifecycle action tells."""
    name, instance_id = response._get_param("LifecycleHookName"), response._get_param("InstanceId")
    group = response.autoscaling_backend.autoscaling_groups.get(response._get_param("AutoScalingGroupName"))
    hook = _termination_hook(group) if group is not None else None
    if group is not None and hook is not None and hook.name == name:
        for state in group.instance_states:
            if state.instance.id == instance_id and state.lifecycle_state == WAITING:
                return group, state
    raise ValidationError(f"No active Lifecycle Action found with instance ID {instance_id}")


def _member(backend: AutoScalingBackend, instance_id: str) -> tuple[FakeAutoScalingGroup, InstanceState]:
    for group in backend.autoscaling_groups.values():
        for state in group.instance_states:
            if state.instance.id == instance_id:
                return group, state
    raise ValidationError(f"Instance Id not found - No managed instance found for instance ID {instance_id}")


def _termination_hook(group: FakeAutoScalingGroup) -> LifecycleHook | None:
    hooks = group.autoscaling_backend.lifecycle_hooks.values()
    return next((hook for hook in hooks if hook.auto_scaling_group_name == group.name), None)


def _wait(group: FakeAutoScalingGroup, state: InstanceState, hook: LifecycleHook, cause: str) -> None:
    """Has the instance end when a heartbeat is over from now on."""
    own: dict[str, Any] = state.__dict__
    if "heartbeat" in own:
        own["heartbeat"].cancel()
    own["leaving_because"] = cause
    own["heartbeat"] = threading.Timer(hook.heartbeat_timeout, _release, (group, state))
    own["heartbeat"].daemon = True
    own["heartbeat"].start()


def _release(group: FakeAutoScalingGroup, state: InstanceState) -> None:
    if state in group.instance_states:  # else it has ended meanwhile
        state.__dict__["heartbeat"].cancel()
        _end(group, state, state.__dict__["leaving_because"])


def _end(group: FakeAutoScalingGroup, state: InstanceState, cause: str) -> None:
    group.instance_states.remove(state)  # first: nothing is to be put in the place of one that the group itself ends
    group.ec2_backend.terminate_instances([state.instance.id])
    record_activity(group, f"Terminating EC2 instance: {state.instance.id}", cause=cause)
