"""The Auto Scaling group that this node belongs to."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config

if TYPE_CHECKING:
    from mypy_boto3_autoscaling import AutoScalingClient

IN_SERVICE = "InService"
PRESENT = (IN_SERVICE, "Pending", "Pending:Wait", "Pending:Proceed")
"""Lifecycle states of instances that are there or coming; all others are leaving or out of the group's hands.
(EC2 Auto Scaling User Guide, "Amazon EC2 Auto Scaling instance lifecycle")"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class View:
    """The group at one moment."""

    name: str
    desired: int
    lifecycle: dict[str, str]
    """Lifecycle state by instance id."""

    def in_service(self) -> set[str]:
        """Instances that are in service."""
        return {node for node, state in self.lifecycle.items() if state == IN_SERVICE}

    def holds(self, node: str) -> bool:
        """Whether the instance is there or coming."""
        return self.lifecycle.get(node) in PRESENT


class Group:
    """The group of one instance. A node asks for it by its own id, because the RunSpec cannot name it."""

    def __init__(self, *, node: str, region: str) -> None:
        self._node = node
        config = Config(connect_timeout=3, read_timeout=10, retries={"mode": "standard", "total_max_attempts": 4})
        self._client: AutoScalingClient = boto3.session.Session().client("autoscaling", region_name=region, config=config)
        self._name = ""

    def look(self) -> View | None:
        """The group as it is now, or None while the instance is in none.

        Raises:
            botocore.exceptions.BotoCoreError, ClientError: the request failed after botocore's own retries.
        """
        name = self._group_name()
        if not name:
            return None
        groups = self._client.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"]
        if not groups:  # deleted
            return View(name=name, desired=0, lifecycle={})
        return View(
            name=name,
            desired=groups[0]["DesiredCapacity"],
            lifecycle={i["InstanceId"]: i["LifecycleState"] for i in groups[0]["Instances"]},
        )

    def members(self) -> set[str]:
        """The nodes that are there or coming.

        Raises:
            botocore.exceptions.BotoCoreError, ClientError: the request failed after botocore's own retries.
        """
        view = self.look()
        return set() if view is None else {node for node in view.lifecycle if view.holds(node)}

    def scale_to_zero(self) -> None:
        """Have the group end all its instances, this one included.

        Raises:
            botocore.exceptions.BotoCoreError, ClientError: the request failed after botocore's own retries.
        """
        view = self.look()
        if view is not None:
            self._client.update_auto_scaling_group(AutoScalingGroupName=view.name, MinSize=0, DesiredCapacity=0)

    def replace_me(self, reason: str) -> None:
        """Have the group end this instance and start another in its place, at once and whatever its grace period.

        Nothing comes of it where the group wants no instance more than it has without this one.

        Args:
            reason: why, for the log: the request has no place for it.

        Raises:
            botocore.exceptions.BotoCoreError, ClientError: the request failed after botocore's own retries.
        """
        log.info("Asking the group to replace %s: %s", self._node, reason)
        self._client.set_instance_health(InstanceId=self._node, HealthStatus="Unhealthy", ShouldRespectGracePeriod=False)

    def complete_hook(self, name: str) -> None:
        """Tell the group that this instance, which waits in a lifecycle hook, is ready to be ended.

        Args:
            name: the hook's.

        Raises:
            botocore.exceptions.BotoCoreError, ClientError: the request failed after botocore's own retries; a
                "ValidationError" when the instance does not wait (any more).
        """
        self._client.complete_lifecycle_action(
            LifecycleHookName=name,
            AutoScalingGroupName=self._group_name(),
            InstanceId=self._node,
            LifecycleActionResult="CONTINUE",
        )

    def heartbeat_hook(self, name: str) -> None:
        """Have the group wait for this instance, which is in a lifecycle hook, for another HeartbeatTimeout from now on.

        Args:
            name: the hook's.

        Raises:
            botocore.exceptions.BotoCoreError, ClientError: as `complete_hook`.
        """
        self._client.record_lifecycle_action_heartbeat(
            LifecycleHookName=name, AutoScalingGroupName=self._group_name(), InstanceId=self._node
        )

    def _group_name(self) -> str:
        """The group's name, or "" while the instance is in none."""
        if not self._name:
            instances = self._client.describe_auto_scaling_instances(InstanceIds=[self._node])["AutoScalingInstances"]
            self._name = instances[0]["AutoScalingGroupName"] if instances else ""
        return self._name
