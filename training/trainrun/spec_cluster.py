"""The part of the RunSpec that says what the cluster consists of, and the moments that its two sides agree on.

Standard library only (`trainrun.spec`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Literal

from trainrun.config import ConfigError

Accelerator = Literal["none", "nvidia", "neuron"]

DRAIN_MINUTES = 10
"""How long before EC2 starts to end a Capacity Block's instances the group is scaled to nothing."""
LEAVING_SECONDS = 60
"""What nodes take to end beside ``timeouts.stop_grace``, which the ranks have: the launcher's end, the last word to S3."""
SHORTEST_HEARTBEAT, LONGEST_HEARTBEAT = 30, 7200
"""Bounds of a lifecycle hook's HeartbeatTimeout, in seconds (EC2 Auto Scaling API, PutLifecycleHook)."""


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """What the cluster consists of, as the node checks it.

    The Auto Scaling group is not named here: its name would make the group and its own launch template depend
    on each other. A node asks autoscaling:DescribeAutoScalingInstances for the group of its own instance id.
    """

    name: str
    """Name of the cluster, for tags, logs and people: the path of the construct."""
    instance_type: str
    nodes_min: int
    """Fewest nodes on which training goes on; below it the others wait."""
    nodes_desired: int
    nodes_max: int
    accelerator: Accelerator = "none"
    """Kind of accelerator; "none" is a CPU node, on which no accelerator is looked for."""
    accelerators_per_node: int = 0
    efa_interfaces: int = 0
    """Number of EFA interfaces that the node must show; 0 when EFA is off."""
    processes_per_node: int = 1
    """Ranks per node: one per accelerator (per Neuron core), or one on a CPU node."""
    nodes_usable: tuple[int, ...] = ()
    """Numbers of nodes among which the job's batch divides, in ascending order; the nodes beyond the largest that is there
    wait as spares. Empty means any number from nodes_min to nodes_max."""
    termination_hook: str = ""
    """Name of the group's lifecycle hook in which a node that is to be ended waits until it has saved; empty means none."""
    capacity_ends: str = ""
    """When the nodes' Capacity Block ends, in ISO 8601 with a time zone; empty has the node ask EC2 whether it is in one."""

    bandwidth_check: bool = False
    """Whether a node measures how fast its GPUs sum a tensor over all of them (all-reduce) before it trains."""

    def __post_init__(self) -> None:
        if not 1 <= self.nodes_min <= self.nodes_max:
            problem = f"nodes_min is {self.nodes_min} and nodes_max {self.nodes_max}. Allowed: 1 <= nodes_min <= nodes_max."
            raise ConfigError([problem])
        if not 0 <= self.nodes_desired <= self.nodes_max:
            raise ConfigError([f"nodes_desired is {self.nodes_desired}. Allowed: 0 to nodes_max ({self.nodes_max})."])
        if self.nodes_usable and list(self.nodes_usable) != sorted(set(self.nodes_usable) & set(self._numbers_of_nodes)):
            problem = (
                f"nodes_usable is {self.nodes_usable}. Allowed: ascending numbers from {self.nodes_min} to {self.nodes_max}."
            )
            raise ConfigError([problem])
        if self.bandwidth_check and (self.accelerator != "nvidia" or self.accelerators_per_node < 2):
            problem = (
                f"bandwidth_check is true, but {self.instance_type} does not have several GPUs, between which there would be "
                "something to measure. Leave it out."
            )
            raise ConfigError([problem])
        if self.capacity_ends and not _has_zone(self.capacity_ends):
            problem = f"capacity_ends is {self.capacity_ends!r}. Allowed: a moment with its zone, as '2026-12-24T11:30:00+00:00'."
            raise ConfigError([problem])

    @property
    def _numbers_of_nodes(self) -> range:
        return range(self.nodes_min, self.nodes_max + 1)

    @property
    def usable_from(self) -> int:
        """The fewest nodes that can train together."""
        return self.nodes_usable[0] if self.nodes_usable else self.nodes_min

    def usable(self, nodes: int) -> int:
        """How many of so many nodes can train together; 0 when they are too few."""
        allowed = self.nodes_usable or self._numbers_of_nodes
        return max((number for number in allowed if number <= nodes), default=0)


def terminations_begin(ends: datetime, *, instance_type: str) -> datetime:
    """When EC2 starts to end the instances of a Capacity Block: 30 minutes before its end, 60 for a P6e UltraServer.

    Source: docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-blocks.html.
    """
    return ends.astimezone(timezone.utc) - timedelta(minutes=60 if instance_type.startswith("p6e-") else 30)


def group_drains(ends: datetime, *, instance_type: str) -> datetime:
    """When the group is scaled to nothing, so that its own way of ending nodes is over before EC2's begins."""
    return terminations_begin(ends, instance_type=instance_type) - timedelta(minutes=DRAIN_MINUTES)


def nodes_save(ends: datetime, *, instance_type: str, stop_grace: float) -> datetime:
    """When the run saves and stops, so that all of it is saved before the group is scaled to nothing.

    Args:
        ends: the block's end.
        instance_type: of its instances.
        stop_grace: seconds that the ranks have for the last checkpoint.
    """
    return group_drains(ends, instance_type=instance_type) - timedelta(seconds=stop_grace + LEAVING_SECONDS)


def hook_heartbeat(stop_grace: float) -> int:
    """The HeartbeatTimeout of the termination hook: time for the last checkpoint, as far as the API allows.

    Args:
        stop_grace: seconds that the ranks have for it. Where that is longer, the node asks for more time while it saves.
    """
    return int(min(LONGEST_HEARTBEAT, max(SHORTEST_HEARTBEAT, stop_grace + LEAVING_SECONDS)))


def _has_zone(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False
