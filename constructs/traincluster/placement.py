"""The cluster placement group: nodes close to each other, on one network spine."""

from __future__ import annotations

from dataclasses import dataclass

from aws_cdk import aws_ec2 as ec2

from constructs import Construct
from traincluster.capacity import Capacity
from traincluster.instances import InstanceType
from traincluster.rules.capacity import PlacementKind


@dataclass(frozen=True)
class Placement:
    """Where nodes are launched: in no group, in one that was made for them, or in one that exists."""

    kind: PlacementKind
    group_name: str | None


def place(
    scope: Construct, *, wanted: bool | ec2.IPlacementGroup | None, capacity: Capacity, instance_type: InstanceType
) -> Placement:
    """Settle the nodes' placement, and make the group if need be. Whether EC2 takes it is a matter of the rules.

    None as ``wanted`` makes a group where it helps: when the type can be in one, nodes are of one type and the capacity is not
    reserved. A reservation that was made in a group puts its nodes there.

    The group is made without a name of its own and referred to by Ref, so that CloudFormation deletes it last, when no
    instance is in it any more.
    """
    if wanted is None and capacity.placement_group is not None:
        return Placement("existing", capacity.placement_group)
    if wanted is None:
        wanted = instance_type.cluster_placement and not capacity.is_placed_by_ec2 and not capacity.instance_types
    if wanted is False:
        return Placement("none", None)
    if wanted is not True:
        return Placement("existing", wanted.placement_group_name)
    return Placement("new", ec2.CfnPlacementGroup(scope, "PlacementGroup", strategy="cluster").ref)
