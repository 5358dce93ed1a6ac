"""What the rules find in a cluster's network: the facts are gathered here, and judged by `traincluster.rules.network`."""

from __future__ import annotations

from collections.abc import Sequence

from aws_cdk import Stack

from constructs import Construct
from traincluster.access import SshAccess
from traincluster.capacity import Capacity
from traincluster.efa import NetworkInterface
from traincluster.instances import InstanceType, offered_regions, offered_zones
from traincluster.network import TrainingNetwork
from traincluster.rules import Finding, check
from traincluster.rules.network import LeftBehind, NodesInNetwork, ShellAccess, ZoneOfNodes
from traincluster.rules.report import known
from traincluster.volumes import DataVolume


def check_network(
    scope: Construct,
    network: TrainingNetwork,
    *,
    instance_type: InstanceType,
    nodes: int,
    interfaces: tuple[NetworkInterface, ...],
    capacity: Capacity,
    file_systems: int,
    volumes: Sequence[DataVolume],
    ssh: SshAccess | None,
) -> list[Finding]:
    """All findings about a cluster's nodes in their network, and about what its destruction leaves."""
    region = known(Stack.of(scope).region)
    in_network = NodesInNetwork(
        instance_type=instance_type.name,
        nodes=nodes,
        interfaces=len(interfaces),
        addresses_per_node=sum(interface.kind != "efa-only" for interface in interfaces),
        efa_interfaces=sum(interface.carries_efa for interface in interfaces),
        most_efa_interfaces=instance_type.max_efa_interfaces,
        other_addresses=len(network.endpoints) + file_systems,
        subnet_is_public=network.subnet_is_public,
        subnet_cidr=network.subnet_cidr,
    )
    zone = ZoneOfNodes(
        instance_type=instance_type.name,
        capacity_is_reserved=capacity.is_placed_by_ec2,
        region=region,
        zone=network.named_zone,
        zone_is_given=network.zone_is_given,
        zone_is_chosen=network.zone_is_chosen,
        offered_regions=offered_regions(instance_type.name),
        offered_zones=offered_zones(instance_type.name, region) if region else (),
    )
    kept = tuple(f"the {volume.size_gib} GiB volume {volume.path} of each node" for volume in volumes if volume.keep)
    return [
        *check(in_network),
        *check(zone),
        *check(ShellAccess(sources=tuple(ssh.sources) if ssh else ())),
        *check(LeftBehind(stays=kept)),
    ]
