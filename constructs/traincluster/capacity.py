"""Where the nodes' capacity comes from: on demand, spot, a reservation or a Capacity Block."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from aws_cdk import aws_ec2 as ec2

from traincluster.instances import InstanceType

CapacityKind = Literal["on-demand", "spot", "reservation", "block"]

_RESERVATION_ID = re.compile(r"cr-[0-9a-f]{8,32}")
_RESOURCE_GROUP_ARN = re.compile(r"arn:aws[a-z-]*:resource-groups:[a-z0-9-]+:\d{12}:group/\S+")


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

    def __post_init__(self) -> None:
        if self.kind in ("on-demand", "spot"):
            assert self.reserved is None, f"capacity {self.kind} takes no reservation"
            return
        text = self.reserved or ""
        if not _RESERVATION_ID.fullmatch(text) and not _RESOURCE_GROUP_ARN.fullmatch(text):
            raise ValueError(
                f"The capacity {self.kind!r} is given the reservation {text!r}. Give the id of a reservation, such as "
                "'cr-0123456789abcdef0', or the ARN of a resource group of reservations."
            )

    @classmethod
    def on_demand(cls) -> Capacity:
        """Ordinary instances at the list price, as long as there are any."""
        return cls("on-demand")

    @classmethod
    def spot(cls) -> Capacity:
        """Spare instances, which EC2 takes back with two minutes' notice."""
        return cls("spot")

    @classmethod
    def reservation(cls, reservation_id: str) -> Capacity:
        """An on-demand capacity reservation that the account holds.

        Raises:
            ValueError: neither the id of a reservation nor the ARN of a resource group of them.
        """
        return cls("reservation", reservation_id)

    @classmethod
    def block(cls, reservation_id: str) -> Capacity:
        """A Capacity Block for ML: instances bought ahead for a fixed time. They are placed close to each other already.

        Raises:
            ValueError: neither the id of a block nor the ARN of a resource group of them.
        """
        return cls("block", reservation_id)

    @classmethod
    def parse(cls, text: str) -> Capacity:
        """Read "on-demand", "spot", "reservation:cr-..." or "block:cr-...".

        Raises:
            ValueError: none of these.
        """
        kind, colon, reserved = text.partition(":")
        if not colon and kind == "on-demand":
            return cls.on_demand()
        if not colon and kind == "spot":
            return cls.spot()
        if kind == "reservation":
            return cls.reservation(reserved)
        if kind == "block":
            return cls.block(reserved)
        raise ValueError(f"capacity is {text!r}. Allowed: 'on-demand', 'spot', 'reservation:cr-...' or 'block:cr-...'.")

    @property
    def is_placed_by_ec2(self) -> bool:
        """Whether the place of the instances was settled when the capacity was reserved.

        Such capacity gets no placement group unless one is asked for: an instance in a group of ours cannot match a
        reservation that was not made in that group, and Capacity Blocks take no group at all
        (docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-blocks.html).
        """
        return self.kind in ("reservation", "block")

    def check_sold(self, instance_type: InstanceType) -> None:
        """Check that EC2 sells the type in this way.

        Raises:
            ValueError: it does not, by the catalogue.
        """
        purchase = {"on-demand": "on-demand", "reservation": "on-demand", "spot": "spot", "block": "capacity-block"}[self.kind]
        if purchase not in instance_type.purchase:
            raise ValueError(
                f"capacity is {self.kind!r}, but EC2 sells {instance_type.name} only as "
                f"{' or '.join(instance_type.purchase) or 'something that the catalogue does not know'}. "
                "Choose another capacity or another instance type."
            )

    def market_options(self) -> ec2.CfnLaunchTemplate.InstanceMarketOptionsProperty | None:
        """The launch template's InstanceMarketOptions. No price limit: the default is the on-demand price."""
        if self.kind == "spot":
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
