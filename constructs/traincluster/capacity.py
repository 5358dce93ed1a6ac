"""Where the nodes' capacity comes from: on demand, spot, a reservation or a Capacity Block."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from aws_cdk import Token
from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_ec2 as ec2

from constructs import Construct
from traincluster.instances import InstanceType, instance_type
from traincluster.rules.capacity import CapacityFacts, CapacityKind, PlacementKind
from traincluster.rules.report import known
from trainrun.spec import group_drains

_RESERVATION_ID = re.compile(r"cr-[0-9a-f]{8,32}")
_RESOURCE_GROUP_ARN = re.compile(r"arn:aws[a-z-]*:resource-groups:[a-z0-9-]+:\d{12}:group/\S+")
_GROUP_NAME = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,253}[\x21-\x7e])?")
_GRAMMAR = (
    "'on-demand', 'spot', 'spot:TYPE,TYPE', 'spot with rebalancing', 'reservation:cr-...', 'reservation:cr-... in GROUP', "
    "'block:cr-...' or 'block:cr-... until 2026-12-24T11:30Z'"
)


@dataclass(frozen=True)
class Capacity:
    """How the nodes are bought. Make one with the constructors below.

    Example:
        >>> Capacity.parse("block:cr-0123456789abcdef0") == Capacity.block("cr-0123456789abcdef0")
        True
    """

    kind: CapacityKind
    reserved: str | None = None
    """Id of the reservation or block ("cr-..."), or the ARN of a resource group of them, as UltraServers need."""
    placement_group: str | None = None
    """Name of the placement group in which the reservation was made."""
    ends: datetime | None = None
    """When the Capacity Block ends."""
    instance_types: tuple[str, ...] = ()
    """Further types that a spot node may be of."""
    rebalancing: bool = False
    """Whether Auto Scaling replaces a spot node ahead of its interruption."""

    def __post_init__(self) -> None:
        for name in self.instance_types:
            instance_type(name)
        if self.ends is not None and self.ends.tzinfo is None:
            raise ValueError(f"The block's end {self.ends.isoformat()!r} has no time zone. Give it as '2026-12-24T11:30Z'.")
        group = self.placement_group
        if group is not None and not Token.is_unresolved(group) and not _GROUP_NAME.fullmatch(group):
            raise ValueError(
                f"The reservation's placement group is called {group!r}. Names of placement groups have 1 to 255 ASCII "
                "characters and no space at either end."
            )
        if self.kind in ("on-demand", "spot"):
            assert self.reserved is None, f"capacity {self.kind} takes no reservation"
            return
        text = self.reserved or ""
        if not Token.is_unresolved(text) and not _RESERVATION_ID.fullmatch(text) and not _RESOURCE_GROUP_ARN.fullmatch(text):
            raise ValueError(
                f"The capacity {self.kind!r} is given the reservation {text!r}. Give the id of a reservation, such as "
                "'cr-0123456789abcdef0', or the ARN of a resource group of reservations."
            )

    @classmethod
    def on_demand(cls) -> Capacity:
        """Ordinary instances at the list price, as long as there are any."""
        return cls("on-demand")

    @classmethod
    def spot(cls, *, instance_types: Sequence[str] = (), rebalancing: bool = False) -> Capacity:
        """Spare instances, which EC2 takes back with two minutes' notice.

        Args:
            instance_types: types that a node may be of besides the cluster's own; EC2 chooses by price and capacity
                (price-capacity-optimized). They need the same accelerators, since all nodes run equal ranks.
            rebalancing: whether Auto Scaling replaces a node as soon as EC2 sees an elevated risk for it. Off by default:
                a change of one node makes all others resume.

        Raises:
            ValueError: a type that the catalogue does not know.
        """
        return cls("spot", instance_types=tuple(instance_types), rebalancing=rebalancing)

    @classmethod
    def reservation(cls, reservation_id: str, *, placement_group: str | None = None) -> Capacity:
        """An on-demand capacity reservation that the account holds.

        Args:
            reservation_id: its id, or the ARN of a resource group of reservations.
            placement_group: name of the placement group in which it was made, if it was made in one: nodes are then put
                into that group. Else they are put into none.

        Raises:
            ValueError: neither the id of a reservation nor the ARN of a resource group of them.
        """
        return cls("reservation", reservation_id, placement_group=placement_group)

    @classmethod
    def block(cls, reservation_id: str, *, ends: datetime | None = None) -> Capacity:
        """A Capacity Block for ML: instances bought ahead for a fixed time. They are placed close to each other already.

        Args:
            reservation_id: its id, or the ARN of a resource group, as UltraServers need.
            ends: when it ends, with a time zone. The run then saves and stops, and the cluster is scaled to nothing, before EC2
                ends the instances, which it starts to do 30 minutes before the end (60 for UltraServers). Without it the nodes
                ask EC2 for the end, and do the same by themselves.

        Raises:
            ValueError: neither the id of a block nor the ARN of a resource group of them, or an end without a time zone.
        """
        return cls("block", reservation_id, ends=ends)

    @classmethod
    def parse(cls, text: str) -> Capacity:
        """Read a capacity as the settings have it; ``str()`` writes it so.

        Raises:
            ValueError: none of these, or what is named in it does not exist.
        """
        kind, colon, rest = text.partition(":")
        if text == "on-demand":
            return cls.on_demand()
        words = text.removesuffix(" with rebalancing")
        if words == "spot" or words.startswith("spot:"):
            types = words.removeprefix("spot").removeprefix(":")
            if bool(types) == (words != "spot"):
                names = tuple(types.split(",")) if types else ()
                return cls.spot(instance_types=names, rebalancing=words != text)
        if kind == "reservation" and colon:
            reserved, _, group = rest.partition(" in ")
            return cls.reservation(reserved, placement_group=group if " in " in rest else None)
        if kind == "block" and colon:
            reserved, _, end = rest.partition(" until ")
            return cls.block(reserved, ends=_read_time(end) if " until " in rest else None)
        raise ValueError(f"capacity is {text!r}. Allowed: {_GRAMMAR}.")

    def __str__(self) -> str:
        text = ":".join(filter(None, [self.kind, self.reserved or ",".join(self.instance_types)]))
        if self.placement_group is not None:
            text += f" in {self.placement_group}"
        if self.ends is not None:
            text += f" until {self.ends.isoformat()}"
        return f"{text} with rebalancing" if self.rebalancing else text

    @property
    def is_placed_by_ec2(self) -> bool:
        """Whether the place of the instances was settled when the capacity was reserved.

        Such capacity gets no placement group unless one is asked for: an instance in a group of ours cannot match a
        reservation that was not made in that group, and Capacity Blocks take no group at all
        (docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-blocks.html).
        """
        return self.kind in ("reservation", "block")

    def types(self, own: InstanceType) -> tuple[InstanceType, ...]:
        """Every type that a node may be of, the cluster's own first."""
        return (own, *(instance_type(name) for name in self.instance_types if name != own.name))

    def facts(self, own: InstanceType, *, nodes: int, placement: PlacementKind, group: str | None) -> CapacityFacts:
        """What the rules look at."""
        return CapacityFacts(
            kind=self.kind,
            types=self.types(own),
            nodes=nodes,
            reserved=known(self.reserved),
            reservation_group=known(self.placement_group),
            ends=self.ends,
            rebalancing=self.rebalancing,
            placement=placement,
            group=known(group),
        )

    def market_options(self) -> ec2.CfnLaunchTemplate.InstanceMarketOptionsProperty | None:
        """The launch template's InstanceMarketOptions. No price limit: the default is the on-demand price.

        With several types the group asks for spot itself, and refuses a template that does (`mixed_instances_policy`).
        """
        if self.kind == "spot" and not self.instance_types:
            return ec2.CfnLaunchTemplate.InstanceMarketOptionsProperty(
                market_type="spot",
                spot_options=ec2.CfnLaunchTemplate.SpotOptionsProperty(
                    spot_instance_type="one-time", instance_interruption_behavior="terminate"
                ),
            )
        if self.kind == "block":
            return ec2.CfnLaunchTemplate.InstanceMarketOptionsProperty(market_type="capacity-block")
        return None

    def reservation_specification(self) -> ec2.CfnLaunchTemplate.CapacityReservationSpecificationProperty | None:
        """The launch template's CapacityReservationSpecification."""
        if self.reserved is None:
            return None
        is_group = self.reserved.startswith("arn:")
        target = ec2.CfnLaunchTemplate.CapacityReservationTargetProperty(
            capacity_reservation_id=None if is_group else self.reserved,
            capacity_reservation_resource_group_arn=self.reserved if is_group else None,
        )
        return ec2.CfnLaunchTemplate.CapacityReservationSpecificationProperty(capacity_reservation_target=target)

    def mixed_instances_policy(
        self, template: autoscaling.CfnAutoScalingGroup.LaunchTemplateSpecificationProperty, own: str
    ) -> autoscaling.CfnAutoScalingGroup.MixedInstancesPolicyProperty | None:
        """The group's MixedInstancesPolicy; None when nodes are of one type, which the launch template names.

        Args:
            template: the launch template of all types.
            own: name of the cluster's own type.
        """
        if not self.instance_types:
            return None
        group = autoscaling.CfnAutoScalingGroup
        return group.MixedInstancesPolicyProperty(
            launch_template=group.LaunchTemplateProperty(
                launch_template_specification=template,
                overrides=[
                    group.LaunchTemplateOverridesProperty(instance_type=name)
                    for name in dict.fromkeys((own, *self.instance_types))
                ],
            ),
            instances_distribution=group.InstancesDistributionProperty(
                on_demand_base_capacity=0,
                on_demand_percentage_above_base_capacity=0,
                spot_allocation_strategy="price-capacity-optimized",
            ),
        )

    def drains_at(self, own: InstanceType) -> datetime | None:
        """When the group is scaled to nothing. Its nodes have saved by then (`trainrun.spec_cluster.nodes_save`)."""
        return None if self.ends is None else group_drains(self.ends, instance_type=own.name)

    @property
    def ends_text(self) -> str:
        """The end as the RunSpec has it; empty when it is not given."""
        return "" if self.ends is None else self.ends.astimezone(timezone.utc).isoformat()

    def holds_terminations(self, asked: bool | None) -> bool:
        """Whether a node that the group ends is waited for until it has saved.

        Args:
            asked: None means unless capacity is spot: an interrupted node is gone in two minutes whatever the group waits for,
                and waiting would only delay its replacement.
        """
        return self.kind != "spot" if asked is None else asked


def schedule_drain(
    scope: Construct, *, group: autoscaling.CfnAutoScalingGroup, capacity: Capacity, own: InstanceType
) -> autoscaling.CfnScheduledAction | None:
    """Scale the group to nothing before its Capacity Block ends; None when there is no end to come."""
    moment = capacity.drains_at(own)
    if moment is None:
        return None
    return autoscaling.CfnScheduledAction(
        scope,
        "DrainBeforeBlockEnds",
        auto_scaling_group_name=group.ref,
        start_time=f"{moment:%Y-%m-%dT%H:%M:%SZ}",
        min_size=0,
        desired_capacity=0,
    )


def _read_time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(re.sub("Z$", "+00:00", text))
    except ValueError:
        raise ValueError(f"The block's end is {text!r}. Give the date and time with a zone, as '2026-12-24T11:30Z'.") from None
