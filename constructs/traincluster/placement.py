"""The cluster placement group: nodes close to each other, on one network spine."""

from __future__ import annotations

from aws_cdk import Annotations
from aws_cdk import aws_ec2 as ec2

from constructs import Construct
from traincluster.capacity import Capacity
from traincluster.instances import InstanceType


def placement_group_name(
    scope: Construct,
    *,
    wanted: bool | ec2.IPlacementGroup | None,
    capacity: Capacity,
    instance_type: InstanceType,
) -> str | None:
    """The name of the group that nodes launch in, made if need be, or None.

    The group is made without a name of its own and referred to by Ref, so that CloudFormation deletes it last, when no
    instance is in it any more.

    Raises:
        ValueError: a group for a Capacity Block, or for a type that cannot be in a cluster group.
    """
    if wanted is False or (wanted is None and (capacity.is_placed_by_ec2 or not instance_type.cluster_placement)):
        return None
    if capacity.kind == "block":
        raise ValueError(
            "capacity is a Capacity Block, but a placement_group is asked for as well. EC2 has placed the block's instances "
            "close to each other already and takes no placement group with it: leave placement_group out."
        )
    if wanted is not None and not isinstance(wanted, bool):
        return wanted.placement_group_name
    if not instance_type.cluster_placement:
        why = "burstable types cannot be in one" if instance_type.burstable else "the type cannot be in one"
        raise ValueError(
            f"placement_group is true, but {why}: {instance_type.name}. Set placement_group to false, or choose another type."
        )
    if capacity.kind == "reservation":
        Annotations.of(scope).add_warning_v2(
            "traincluster:reservationInNewGroup",
            "A placement group is made for nodes whose capacity is reserved. Instances in it match only a reservation that was "
            "made in that group, so nodes may not start. Name the reservation's own group, or leave placement_group out.",
        )
    return ec2.CfnPlacementGroup(scope, "PlacementGroup", strategy="cluster").ref
