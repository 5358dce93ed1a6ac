"""What a node asks of its own Auto Scaling group."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError
from botocore.stub import Stubber

from trainrun.node.group import Group


class TestGroup:
    def test_a_node_without_a_group_has_no_view(self, aws):
        assert Group(node="i-0123456789abcdef0", region="us-east-1").look() is None

    def test_the_group_hears_that_one_node_is_to_be_replaced(self, group):
        group.create(desired=2)
        mine, other = group.instances()
        Group(node=mine, region="us-east-1").replace_me("the matrix product was wrong")
        health = {i["InstanceId"]: i["HealthStatus"] for i in group.describe()["Instances"]}
        assert health == {mine: "Unhealthy", other: "Healthy"}

    @pytest.fixture
    def waiting(self, group):
        """The group of a node in a hook, and what it is to ask; moto knows no lifecycle actions."""
        group.create(desired=1)
        (node,) = group.instances()
        own = Group(node=node, region="us-east-1")
        own.look()
        with Stubber(own._client) as stub:
            yield own, stub, {"LifecycleHookName": "leave", "AutoScalingGroupName": group.name, "InstanceId": node}
            stub.assert_no_pending_responses()

    def test_a_hook_is_completed(self, waiting):
        own, stub, asked = waiting
        stub.add_response("complete_lifecycle_action", {}, {**asked, "LifecycleActionResult": "CONTINUE"})
        own.complete_hook("leave")

    def test_a_hook_is_prolonged(self, waiting):
        own, stub, asked = waiting
        stub.add_response("record_lifecycle_action_heartbeat", {}, asked)
        own.heartbeat_hook("leave")

    def test_who_does_not_wait_hears_of_it(self, waiting):
        own, stub, _ = waiting
        stub.add_client_error("complete_lifecycle_action", "ValidationError", "No active Lifecycle Action found")
        with pytest.raises(ClientError, match="No active Lifecycle Action"):
            own.complete_hook("leave")
