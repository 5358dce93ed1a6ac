"""Instances that leave their group: through a lifecycle hook, by request, as unhealthy."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from botocore.exceptions import ClientError
from groups import cluster, described, members
from moto.autoscaling.models import LifecycleHook

from trainlocal.cloud.services import lifecycle


def hooked(*, heartbeat: int = 600, **sizes: Any) -> dict[str, Any]:
    template = cluster({}, **{"minimum": 0, "desired": 2, **sizes})
    template["Resources"]["Hook"] = {
        "Type": "AWS::AutoScaling::LifecycleHook",
        "Properties": {
            "AutoScalingGroupName": {"Ref": "Group"},
            "LifecycleHookName": "leave",
            "LifecycleTransition": "autoscaling:EC2_INSTANCE_TERMINATING",
            "HeartbeatTimeout": heartbeat,
            "DefaultResult": "CONTINUE",
        },
    }
    return template


@pytest.fixture
def made(cloud, stack):
    """A group of two with a hook; its name."""
    assert stack.create(hooked()) == "CREATE_COMPLETE"
    yield stack.physical("Group")
    stack.delete()


def states(cloud, stack) -> dict[str, str]:
    return {each["InstanceId"]: each["LifecycleState"] for each in members(cloud, stack)}


def is_running(cloud, instance_id: str) -> bool:
    return described(cloud, instance_id)["State"]["Name"] == "running"


def test_who_is_scaled_in_waits_until_it_says_that_it_is_ready(cloud, stack, made) -> None:
    scaling = cloud.client("autoscaling")
    scaling.set_desired_capacity(AutoScalingGroupName=made, DesiredCapacity=1)
    (leaving,) = [name for name, state in states(cloud, stack).items() if state == "Terminating:Wait"]
    assert sorted(states(cloud, stack).values()) == ["InService", "Terminating:Wait"]
    assert is_running(cloud, leaving)
    told = {"LifecycleHookName": "leave", "AutoScalingGroupName": made, "InstanceId": leaving}
    scaling.record_lifecycle_action_heartbeat(**told)
    scaling.complete_lifecycle_action(**told, LifecycleActionResult="CONTINUE")
    assert list(states(cloud, stack).values()) == ["InService"]
    assert not is_running(cloud, leaving)
    with pytest.raises(ClientError, match="No active Lifecycle Action found"):
        scaling.complete_lifecycle_action(**told, LifecycleActionResult="CONTINUE")


@pytest.mark.parametrize("way", ["unhealthy", "request"])
def test_who_is_replaced_waits_while_its_replacement_starts(cloud, stack, made, way: str) -> None:
    scaling = cloud.client("autoscaling")
    lost, other = states(cloud, stack)
    if way == "unhealthy":
        scaling.set_instance_health(InstanceId=lost, HealthStatus="Unhealthy", ShouldRespectGracePeriod=False)
    else:
        scaling.terminate_instance_in_auto_scaling_group(InstanceId=lost, ShouldDecrementDesiredCapacity=False)
    after = states(cloud, stack)
    assert (after.pop(lost), after.pop(other)) == ("Terminating:Wait", "InService")
    assert list(after.values()) == ["InService"]
    found = scaling.describe_auto_scaling_instances(InstanceIds=[lost])["AutoScalingInstances"]
    assert found[0]["LifecycleState"] == "Terminating:Wait"
    cloud.client("ec2").terminate_instances(InstanceIds=[lost])  # a node that dies while it waits
    assert len(states(cloud, stack)) == 2


def test_who_is_ended_without_a_replacement_makes_the_group_smaller(cloud, stack, made) -> None:
    scaling = cloud.client("autoscaling")
    first, second = states(cloud, stack)
    for instance, desired in ((first, 1), (second, 0)):
        scaling.terminate_instance_in_auto_scaling_group(InstanceId=instance, ShouldDecrementDesiredCapacity=True)
        group = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[made])["AutoScalingGroups"][0]
        assert group["DesiredCapacity"] == desired
    assert states(cloud, stack) == dict.fromkeys((first, second), "Terminating:Wait")
    scaling.update_auto_scaling_group(AutoScalingGroupName=made, MinSize=1, DesiredCapacity=1)
    new = next(name for name, state in states(cloud, stack).items() if state == "InService")
    with pytest.raises(ClientError, match="violate group's min size"):
        scaling.terminate_instance_in_auto_scaling_group(InstanceId=new, ShouldDecrementDesiredCapacity=True)
    with pytest.raises(ClientError, match="No managed instance found"):
        scaling.set_instance_health(InstanceId="i-0123456789abcdef0", HealthStatus="Unhealthy")


def test_a_heartbeat_has_bounds_and_who_waits_in_a_hook_that_is_deleted_goes_on(cloud, stack) -> None:
    assert stack.create(hooked(heartbeat=30, desired=1)) == "CREATE_COMPLETE"
    scaling, name = cloud.client("autoscaling"), stack.physical("Group")
    with pytest.raises(ClientError, match="between 30 and 7200"):
        scaling.put_lifecycle_hook(
            AutoScalingGroupName=name,
            LifecycleHookName="leave",
            LifecycleTransition="autoscaling:EC2_INSTANCE_TERMINATING",
            HeartbeatTimeout=29,
        )
    with pytest.raises(ClientError, match="EC2_INSTANCE_LAUNCHING"):
        scaling.put_lifecycle_hook(
            AutoScalingGroupName=name, LifecycleHookName="x", LifecycleTransition="autoscaling:EC2_INSTANCE_LAUNCHING"
        )
    scaling.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=0)
    assert list(states(cloud, stack).values()) == ["Terminating:Wait"]
    scaling.delete_lifecycle_hook(AutoScalingGroupName=name, LifecycleHookName="leave")  # whoever waits in it goes on
    assert states(cloud, stack) == {}
    stack.delete()


def test_a_stack_is_deleted_without_waiting_for_hooks(cloud, stack, made) -> None:
    ids = list(states(cloud, stack))
    cloud.client("autoscaling").set_desired_capacity(AutoScalingGroupName=made, DesiredCapacity=1)
    started = time.monotonic()
    stack.delete()
    assert time.monotonic() - started < 10
    assert not any(is_running(cloud, instance) for instance in ids)


def test_a_rolling_update_lets_nodes_save_first(cloud, stack, made) -> None:
    before = set(states(cloud, stack))
    changed = hooked()
    changed["Resources"]["Template"]["Properties"]["LaunchTemplateData"]["UserData"] = "bmV3"
    assert stack.update(changed) == "UPDATE_COMPLETE"
    after = states(cloud, stack)
    assert {after[name] for name in before} == {"Terminating:Wait"}
    assert sorted(after.values()) == ["InService"] * 2 + ["Terminating:Wait"] * 2


def test_who_says_nothing_is_ended_when_its_heartbeat_is_over(monkeypatch) -> None:
    """In this process, where a heartbeat can be short."""

    class Ec2:
        ended: ClassVar[list[str]] = []

        def terminate_instances(self, ids):
            self.ended += ids

    hook = LifecycleHook("leave", "group", lifecycle.TERMINATING, 600, "CONTINUE")
    hook.heartbeat_timeout = 0.2
    state = SimpleNamespace(lifecycle_state="InService", instance=SimpleNamespace(id="i-1"))
    backend = SimpleNamespace(lifecycle_hooks={"group_leave": hook})
    group = SimpleNamespace(name="group", instance_states=[state], autoscaling_backend=backend, ec2_backend=Ec2())
    told: list[str] = []
    monkeypatch.setattr(lifecycle, "record_activity", lambda group, text, *, cause: told.append(cause))
    lifecycle.leave(group, state, cause="the test wants it")
    assert (state.lifecycle_state, told) == ("Terminating:Wait", [])
    deadline = time.monotonic() + 5
    while not told:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (told, Ec2.ended, group.instance_states) == (["the test wants it"], ["i-1"], [])
