"""What can go wrong with the way in which nodes are bought and placed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal

from traincluster.instances import InstanceType
from traincluster.rules.engine import rule
from traincluster.rules.finding import Finding

CapacityKind = Literal["on-demand", "spot", "reservation", "block"]
PlacementKind = Literal["none", "new", "existing"]

MOST_IN_A_BLOCK = 64
MOST_IN_ALL_BLOCKS = 256
MOST_SPOT_TYPES = 40

_BLOCKS = "docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-blocks.html"
_PLACEMENT = "docs.aws.amazon.com/AWSEC2/latest/UserGuide/placement-groups.html"
_MIXED = "docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-mixed-instances-groups.html"

_ULTRASERVERS = {"p6e-gb200": 9, "trn2u": 4}
"""Families that come as UltraServers, and the instances of the smallest one."""


@dataclass(frozen=True, kw_only=True)
class CapacityFacts:
    """What a cluster's nodes are, how they are bought and where they are placed."""

    kind: CapacityKind
    types: tuple[InstanceType, ...]
    """The types that a node can be of: the cluster's own first, then the alternatives on spot."""
    nodes: int
    reserved: str | None
    """Id of the reservation or block, or ARN of a resource group of them."""
    reservation_group: str | None
    """Placement group in which the reservation was made, as far as the user names one."""
    ends: datetime | None
    """End of the Capacity Block, as far as the user gives it."""
    rebalancing: bool
    placement: PlacementKind
    """Whether nodes are in a placement group: in none, in one that is made for them, in one that exists."""
    group: str | None
    """Name of the group that exists."""

    @property
    def type(self) -> InstanceType:
        return self.types[0]


@dataclass(frozen=True)
class Quota:
    """A limit of an account, counted in vCPUs."""

    name: str
    code: str


_P = ("P", "L-417A185B", "L-7212CCBC")
_G = ("G and VT", "L-DB2E81BA", "L-3819A6DF")
_STANDARD = ("Standard", "L-1216C47A", "L-34B43A08")
_QUOTAS: dict[str, tuple[str, str, str | None]] = {
    "p": _P,
    **dict.fromkeys(("g", "gr", "vt"), _G),
    "trn": ("Trn", "L-2C3B7624", "L-6B0D517C"),
    "inf": ("Inf", "L-1945791B", "L-B5D1601B"),
    "dl": ("DL", "L-6E869C2A", "L-85EED4F7"),
    "hpc": ("HPC", "L-F7808C92", None),
    **dict.fromkeys(("a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"), _STANDARD),
}
"""By the letters that a type's name begins with: name of the quota, its code on demand, its code on spot."""


def quota_of(instance_type: InstanceType, *, spot: bool) -> Quota | None:
    """The quota that instances of a type count against; None where the catalogue of quotas here has none."""
    letters = re.match("[a-z]+", instance_type.name)
    found = _QUOTAS.get(letters[0]) if letters else None
    if found is None:
        return None
    name, on_demand, on_spot = found
    code = on_spot if spot else on_demand
    kind = f"All {name} Spot Instance Requests" if spot else f"Running On-Demand {name} instances"
    return None if code is None else Quota(kind, code)


@rule(
    "capacity-is-sold",
    summary="EC2 sells the instance type in the way that is asked for.",
    source="EC2 DescribeInstanceTypes (supportedUsageClasses), docs.aws.amazon.com/ec2/latest/instancetypes/ac.html",
)
def capacity_is_sold(facts: CapacityFacts) -> Iterator[Finding]:
    purchase = {"on-demand": "on-demand", "reservation": "on-demand", "spot": "spot", "block": "capacity-block"}[facts.kind]
    for each in facts.types:
        if purchase not in each.purchase:
            ways = " or ".join(each.purchase) or "in a way that the catalogue does not know"
            yield Finding(
                "error",
                "capacity-is-sold",
                f"capacity is {facts.kind!r}, but EC2 sells {each.name} only as {ways}.",
                "Choose another capacity or another instance type.",
            )


@rule(
    "block-takes-no-placement-group",
    summary="A Capacity Block is used without a placement group: EC2 has placed its instances already.",
    source=f"{_BLOCKS}, aws/aws-parallelcluster#6311 (CAP-01)",
)
def block_takes_no_placement_group(facts: CapacityFacts) -> Iterator[Finding]:
    if facts.kind == "block" and facts.placement != "none":
        yield Finding(
            "error",
            "block-takes-no-placement-group",
            "capacity is a Capacity Block, but a placement_group is asked for as well. EC2 has placed the block's instances "
            "close to each other already and takes no placement group with it.",
            "Leave placement_group out.",
        )


@rule(
    "type-takes-no-placement-group",
    summary="The instance type can be in a cluster placement group when one is asked for.",
    source=f"{_PLACEMENT}, aws/aws-parallelcluster#1253 (CAP-06)",
)
def type_takes_no_placement_group(facts: CapacityFacts) -> Iterator[Finding]:
    if facts.placement == "none" or facts.kind == "block":
        return
    for each in facts.types:
        if not each.cluster_placement:
            why = "burstable types cannot be in one" if each.burstable else "the type cannot be in one"
            yield Finding(
                "error",
                "type-takes-no-placement-group",
                f"placement_group is set, but {why}: {each.name}.",
                "Set placement_group to false, or choose another type.",
            )


@rule(
    "reservation-has-own-placement-group",
    summary="Instances that use a reservation are in the placement group in which it was made, or in none.",
    source="docs.aws.amazon.com/AWSEC2/latest/UserGuide/cr-cpg.html, eksctl-io/eksctl#7949 (CAP-02)",
    levels=("error", "warning"),
)
def reservation_has_own_placement_group(facts: CapacityFacts) -> Iterator[Finding]:
    if facts.kind != "reservation":
        return
    name = "reservation-has-own-placement-group"
    own = facts.reservation_group
    if own is not None and facts.placement == "none":
        yield Finding(
            "error",
            name,
            f"The reservation was made in the placement group {own!r}, but placement_group is false: instances outside of the "
            "group cannot use it.",
            "Leave placement_group out.",
        )
    elif own is not None and (facts.placement == "new" or facts.group not in (None, own)):
        other = "a new one" if facts.placement == "new" else repr(facts.group)
        yield Finding(
            "error",
            name,
            f"The reservation was made in the placement group {own!r}, but placement_group asks for {other}: instances there "
            "cannot use it.",
            "Leave placement_group out: nodes are then put into the reservation's group.",
        )
    elif own is None and facts.placement == "new":
        yield Finding(
            "warning",
            name,
            "A placement group is made for nodes whose capacity is reserved. Instances in it match only a reservation that was "
            "made in that group, so nodes may not start.",
            "Name the reservation's own group, or leave placement_group out.",
        )


@rule(
    "block-size",
    summary=f"A Capacity Block has up to {MOST_IN_A_BLOCK} instances, all blocks of an account up to {MOST_IN_ALL_BLOCKS}.",
    source=_BLOCKS,
)
def block_size(facts: CapacityFacts) -> Iterator[Finding]:
    if facts.kind != "block" or facts.reserved is None:
        return
    in_group = facts.reserved.startswith("arn:")
    most = MOST_IN_ALL_BLOCKS if in_group else MOST_IN_A_BLOCK
    if facts.nodes > most:
        what = "All Capacity Blocks of an account together have" if in_group else "A Capacity Block has"
        yield Finding(
            "error", "block-size", f"nodes is {facts.nodes}. {what} at most {most} instances.", f"Ask for {most} or fewer."
        )


@rule(
    "ultraserver-needs-resource-group",
    summary="Instances of an UltraServer are launched by the resource group of their Capacity Block.",
    source="docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-launch.html",
    levels=("warning",),
)
def ultraserver_needs_resource_group(facts: CapacityFacts) -> Iterator[Finding]:
    if facts.kind != "block" or facts.reserved is None or facts.reserved.startswith("arn:"):
        return
    if _family(facts.type) in _ULTRASERVERS:
        yield Finding(
            "warning",
            "ultraserver-needs-resource-group",
            f"{facts.type.name} comes as an UltraServer, but the Capacity Block is given by its id {facts.reserved!r}.",
            "Put the block into a resource group and give the group's ARN, as 'block:arn:aws:resource-groups:...'.",
        )


@rule(
    "ultraserver-is-whole",
    summary="A cluster of UltraServers has all instances of each.",
    source="docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-blocks.html (UltraServer sizes)",
    levels=("warning",),
)
def ultraserver_is_whole(facts: CapacityFacts) -> Iterator[Finding]:
    size = _ULTRASERVERS.get(_family(facts.type))
    if size is not None and facts.nodes % size:
        yield Finding(
            "warning",
            "ultraserver-is-whole",
            f"nodes is {facts.nodes}, but UltraServers of {facts.type.name} have {size} instances or a multiple of them, which "
            "are paid for whether they train or not.",
            f"Set nodes to {facts.nodes + size - facts.nodes % size}.",
        )


@rule(
    "block-end-is-known",
    summary="The end of a Capacity Block is given, so that the group is scaled to nothing before EC2 ends its nodes.",
    source=f"{_BLOCKS} (termination starts 30 minutes before the end, 60 for UltraServers)",
    levels=("warning",),
)
def block_end_is_known(facts: CapacityFacts) -> Iterator[Finding]:
    if facts.kind == "block" and facts.ends is None:
        yield Finding(
            "warning",
            "block-end-is-known",
            "The end of the Capacity Block is not given, so no drain is scheduled. Nodes ask EC2 for it and save before it, but "
            "where nobody trains at the end the group keeps its size, and tries in vain to launch nodes.",
            "Give the end, as 'block:cr-... until 2026-12-24T11:30Z'.",
        )


@rule(
    "block-ends-at-half-past-eleven",
    summary="Capacity Blocks end at 11:30 UTC.",
    source=_BLOCKS,
    levels=("warning",),
)
def block_ends_at_half_past_eleven(facts: CapacityFacts) -> Iterator[Finding]:
    if facts.kind != "block" or facts.ends is None:
        return
    end = facts.ends.astimezone(timezone.utc)
    if (end.hour, end.minute) != (11, 30):
        yield Finding(
            "warning",
            "block-ends-at-half-past-eleven",
            f"The Capacity Block is said to end at {end:%H:%M} UTC, but blocks end at 11:30 UTC: the drain would come at a wrong "
            "time.",
            "Give the EndDate that `aws ec2 describe-capacity-reservations` shows for the block.",
        )


@rule(
    "spot-types-are-alike",
    summary="The instance types of a spot cluster have the same processor architecture, accelerators and network cards.",
    source="aws-parallelcluster InstancesAcceleratorsValidator and InstancesNetworkingValidator; torchrun needs equal nodes",
    levels=("error", "warning"),
)
def spot_types_are_alike(facts: CapacityFacts) -> Iterator[Finding]:
    for other in facts.types[1:]:
        for what, own, others in _differences(facts.type, other):
            yield Finding(
                "error",
                "spot-types-are-alike",
                f"A node can be {facts.type.name} or {other.name}, but they differ in {what}: {own} and {others}. All nodes are "
                "made from one launch template and run equal ranks.",
                f"Leave {other.name} out of the capacity.",
            )
        own_chip, other_chip = facts.type.accelerator, other.accelerator
        if own_chip and other_chip and own_chip.kind == other_chip.kind and own_chip.name != other_chip.name:
            yield Finding(
                "warning",
                "spot-types-are-alike",
                f"A node can have {own_chip.name} or {other_chip.name} ({facts.type.name}, {other.name}): the slowest node sets "
                "the pace of all, and the smallest memory the largest model.",
                f"Leave {other.name} out of the capacity, or size the job for the lesser of the two.",
            )


@rule(
    "spot-types-count",
    summary=f"An Auto Scaling group takes up to {MOST_SPOT_TYPES} instance types.",
    source=_MIXED,
)
def spot_types_count(facts: CapacityFacts) -> Iterator[Finding]:
    if len(facts.types) > MOST_SPOT_TYPES:
        message = f"The capacity names {len(facts.types)} instance types. An Auto Scaling group takes at most {MOST_SPOT_TYPES}."
        yield Finding("error", "spot-types-count", message, "Name fewer.")


@rule(
    "spot-types-in-one-placement-group",
    summary="Several instance types in one placement group find capacity less often.",
    source=_PLACEMENT,
    levels=("warning",),
)
def spot_types_in_one_placement_group(facts: CapacityFacts) -> Iterator[Finding]:
    if len(facts.types) > 1 and facts.placement != "none":
        yield Finding(
            "warning",
            "spot-types-in-one-placement-group",
            f"Nodes can be of {len(facts.types)} types, but a placement_group is asked for: EC2 seldom has room for several "
            "types close to each other.",
            "Leave placement_group out, or name one type.",
        )


@rule(
    "spot-has-one-pool",
    summary="Spot with one type in one zone draws on a single pool.",
    source="docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-best-practices.html (be flexible about types and zones)",
    levels=("info",),
)
def spot_has_one_pool(facts: CapacityFacts) -> Iterator[Finding]:
    if facts.kind == "spot" and len(facts.types) == 1:
        yield Finding(
            "info",
            "spot-has-one-pool",
            f"Spot capacity comes from one pool, {facts.type.name} in one zone: when it is empty, nodes wait.",
            "Name other types that have the same accelerators, as 'spot:g6e.24xlarge,g6e.48xlarge', where there are any.",
        )


@rule(
    "rebalancing-stops-the-whole-cluster",
    summary="Capacity rebalancing replaces nodes that still train, and each change of node stops all others.",
    source="docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-capacity-rebalancing.html",
    levels=("warning",),
)
def rebalancing_stops_the_whole_cluster(facts: CapacityFacts) -> Iterator[Finding]:
    if facts.rebalancing and facts.nodes > 1:
        yield Finding(
            "warning",
            "rebalancing-stops-the-whole-cluster",
            f"Capacity rebalancing replaces a node when EC2 sees an elevated risk for it. All {facts.nodes} nodes train as one, "
            "so each replacement makes all of them resume from the last checkpoint.",
            "Leave rebalancing off: nodes act on the two-minute notice.",
        )


@rule(
    "vcpus-within-quota",
    summary="The vCPUs that the nodes need, and the quota that they count against.",
    source="docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html",
    levels=("info",),
)
def vcpus_within_quota(facts: CapacityFacts) -> Iterator[Finding]:
    if facts.kind not in ("on-demand", "spot"):
        return  # what is reserved has been counted, and Capacity Blocks count against no such quota
    quota = quota_of(facts.type, spot=facts.kind == "spot")
    if quota is None:
        return
    vcpus = facts.nodes * max(each.vcpus for each in facts.types)
    yield Finding(
        "info",
        "vcpus-within-quota",
        f"{facts.nodes} x {facts.type.name} take up to {vcpus:,} vCPUs of the quota {quota.name!r} ({quota.code}), which new "
        "accounts often have at 0.",
        f"See yours by `aws service-quotas get-service-quota --service-code ec2 --quota-code {quota.code}`.",
    )


def _family(instance_type: InstanceType) -> str:
    return instance_type.name.partition(".")[0]


def _differences(one: InstanceType, other: InstanceType) -> Iterator[tuple[str, object, object]]:
    """In what two types differ so that one launch template and one job cannot serve both."""
    for what, own, others in (
        ("processor architecture", one.arch, other.arch),
        ("kind of accelerator", _accelerator(one), _accelerator(other)),
        ("ranks per node", one.training_processes, other.training_processes),
        ("network cards", one.network_cards, other.network_cards),
        ("cards with EFA", len(one.efa_cards), len(other.efa_cards)),
    ):
        if own != others:
            yield what, own, others


def _accelerator(instance_type: InstanceType) -> str:
    return instance_type.accelerator.kind if instance_type.accelerator else "none"
