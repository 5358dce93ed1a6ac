"""What can go wrong with the network of a cluster, and what a destroyed cluster leaves."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass

from traincluster.rules.engine import rule
from traincluster.rules.finding import Finding

RESERVED_ADDRESSES = 5
"""What AWS keeps of every subnet (docs.aws.amazon.com/vpc/latest/userguide/subnet-sizing.html)."""


@dataclass(frozen=True, kw_only=True)
class NodesInNetwork:
    """A cluster's nodes and the subnet that they are in."""

    instance_type: str
    nodes: int
    interfaces: int
    """Network interfaces of one node."""
    addresses_per_node: int
    """Those of them that take an address of the subnet: all but `efa-only` ones."""
    efa_interfaces: int
    most_efa_interfaces: int
    other_addresses: int
    """Addresses that something else of this app takes in the subnet: endpoints and file systems."""
    subnet_is_public: bool | None
    subnet_cidr: str | None


@dataclass(frozen=True, kw_only=True)
class ZoneOfNodes:
    """The Availability Zone that the nodes are in, and what the snapshot of offerings says about the type."""

    instance_type: str
    capacity_is_reserved: bool
    region: str | None
    zone: str | None
    """The zone as the user named it, by name or by id; None when it was not named."""
    zone_is_given: bool
    """Whether the zone was named, or comes with the user's own VPC."""
    zone_is_chosen: bool
    """Whether the library chose one that offers the type."""
    offered_regions: tuple[str, ...]
    """Regions that offer the type; none when the snapshot does not know it."""
    offered_zones: tuple[str, ...]
    """Ids of the zones of this region that offer it."""


@dataclass(frozen=True, kw_only=True)
class ShellAccess:
    """From where SSH is let in."""

    sources: tuple[str, ...]
    """IPv4 address ranges, valid ones."""


@dataclass(frozen=True, kw_only=True)
class LeftBehind:
    """What a stack holds that its destruction does not end."""

    stays: tuple[str, ...]
    """Each as a phrase, such as "the bucket Data/Checkpoints"."""


@rule(
    "nodes-need-private-subnet",
    summary="Nodes are in a private subnet: EC2 gives no public address to an instance with several interfaces.",
    source="docs.aws.amazon.com/AWSEC2/latest/APIReference (InstanceNetworkInterfaceSpecification), aws/libfabric#6",
)
def nodes_need_private_subnet(facts: NodesInNetwork) -> Iterator[Finding]:
    if not facts.subnet_is_public:
        return
    if facts.interfaces > 1:
        why = f"EC2 assigns no public address to {facts.instance_type} with its {facts.interfaces} network interfaces"
    else:
        why = "nodes get no public address"
    yield Finding(
        "error",
        "nodes-need-private-subnet",
        f"The nodes are in a public subnet, but {why}, and without one an internet gateway lets nothing through.",
        "Use a private subnet with a NAT gateway or VPC endpoints; Session Manager reaches the nodes there.",
    )


@rule(
    "subnet-too-small",
    summary="The subnet has an address for every interface that carries IP, and for endpoints and file systems.",
    source="docs.aws.amazon.com/vpc/latest/userguide/subnet-sizing.html: 5 addresses of every subnet are AWS's own",
)
def subnet_too_small(facts: NodesInNetwork) -> Iterator[Finding]:
    if facts.subnet_cidr is None:
        return
    free = ipaddress.ip_network(facts.subnet_cidr, strict=False).num_addresses - RESERVED_ADDRESSES
    needed = facts.nodes * facts.addresses_per_node + facts.other_addresses
    if needed <= free:
        return
    fewer = ""
    if facts.addresses_per_node > 1:
        fewer = ', or lay EFA out as "efa-only", whose interfaces take no address'
    yield Finding(
        "error",
        "subnet-too-small",
        f"The subnet {facts.subnet_cidr} has {free:,} free addresses at most, but {needed:,} are needed: {facts.nodes:,} nodes "
        f"of {facts.addresses_per_node} each, and {facts.other_addresses} for endpoints and file systems.",
        f"Give a larger cidr or subnet, or fewer nodes{fewer}.",
    )


@rule(
    "efa-left-out",
    summary="Several nodes of a type that has EFA use it.",
    source="docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html",
    levels=("warning",),
)
def efa_left_out(facts: NodesInNetwork) -> Iterator[Finding]:
    if facts.nodes > 1 and facts.most_efa_interfaces and not facts.efa_interfaces:
        yield Finding(
            "warning",
            "efa-left-out",
            f"efa is false, but {facts.instance_type} has {facts.most_efa_interfaces} EFA interfaces: {facts.nodes} nodes talk "
            "over one ordinary interface, a fraction of the bandwidth that is paid for.",
            "Leave efa out, or acknowledge this.",
        )


@rule(
    "type-not-offered",
    summary="The region, and the zone if it is named by id, offer the instance type.",
    source="EC2 DescribeInstanceTypeOfferings as recorded in moto, undated: the account itself is what counts",
    levels=("warning",),
)
def type_not_offered(facts: ZoneOfNodes) -> Iterator[Finding]:
    if facts.region is None or not facts.offered_regions:
        return
    undated = (
        "The record is undated; `aws ec2 describe-instance-type-offerings --location-type availability-zone-id` has what holds."
    )
    if facts.region not in facts.offered_regions:
        yield Finding(
            "warning",
            "type-not-offered",
            f"By the library's record {facts.region} does not offer {facts.instance_type}; these regions do: "
            f"{', '.join(facts.offered_regions)}. {undated}",
            "Choose another region or type, or acknowledge this.",
        )
    elif facts.zone is not None and "-az" in facts.zone and facts.zone not in facts.offered_zones:
        yield Finding(
            "warning",
            "type-not-offered",
            f"By the library's record the zone {facts.zone} does not offer {facts.instance_type}; these of {facts.region} do: "
            f"{', '.join(facts.offered_zones)}. {undated}",
            "Choose another availability_zone, or acknowledge this.",
        )


@rule(
    "zone-of-reservation",
    summary="Reserved capacity names the Availability Zone that it was reserved in.",
    source="docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-reservations.html",
    levels=("warning",),
)
def zone_of_reservation(facts: ZoneOfNodes) -> Iterator[Finding]:
    if facts.capacity_is_reserved and not facts.zone_is_given:
        where = "a zone that offers the type" if facts.zone_is_chosen else "the first zone of the region"
        yield Finding(
            "warning",
            "zone-of-reservation",
            f"The capacity is reserved in one Availability Zone, but availability_zone is not set: the nodes are put into "
            f"{where} and start only if that is the reservation's.",
            "Set availability_zone to the reservation's zone, by name or by id.",
        )


@rule(
    "zone-not-chosen",
    summary="Nodes of a scarce type are in a zone that was named or that offers the type.",
    source="EC2 offers accelerated types in some zones of a region only; aws/aws-parallelcluster#1216",
    levels=("info",),
)
def zone_not_chosen(facts: ZoneOfNodes) -> Iterator[Finding]:
    if facts.offered_regions and not (facts.zone_is_given or facts.zone_is_chosen or facts.capacity_is_reserved):
        yield Finding(
            "info",
            "zone-not-chosen",
            f"The nodes are in the first zone that the account is shown, which need not offer {facts.instance_type}.",
            "Set availability_zone, or set region, and a zone is chosen that by the library's record offers the type.",
        )


@rule(
    "ssh-from-anywhere",
    summary="SSH is not open to every address.",
    source="AWS Security Hub EC2.13; Session Manager needs no open port",
)
def ssh_from_anywhere(facts: ShellAccess) -> Iterator[Finding]:
    for source in facts.sources:
        if ipaddress.ip_network(source, strict=False).prefixlen == 0:
            yield Finding(
                "error",
                "ssh-from-anywhere",
                f"ssh_from is {source!r}, which is every address.",
                "Give the ranges that people come from, such as '10.20.0.0/16', or use Session Manager, which needs no port.",
            )


@rule(
    "ssh-from-public-range",
    summary="SSH is let in from private ranges, since nodes have no public address.",
    source="Nodes are in a private subnet: traffic from the internet does not reach them",
    levels=("warning",),
)
def ssh_from_public_range(facts: ShellAccess) -> Iterator[Finding]:
    for source in facts.sources:
        network = ipaddress.ip_network(source, strict=False)
        if network.prefixlen and not network.is_private:
            yield Finding(
                "warning",
                "ssh-from-public-range",
                f"ssh_from holds {source!r}, a public range, but nodes have no public address, so nothing arrives from there.",
                "Give the range that a VPN or a peered network comes from, or use Session Manager.",
            )


@rule(
    "stays-after-destroy",
    summary="What a destroyed stack leaves in the account, and goes on costing money, is told at synth.",
    source="CloudFormation DeletionPolicy; EC2 DeleteOnTermination",
    levels=("info",),
)
def stays_after_destroy(facts: LeftBehind) -> Iterator[Finding]:
    if facts.stays:
        yield Finding(
            "info",
            "stays-after-destroy",
            f"`cdk destroy` leaves in the account, where it goes on costing money: {'; '.join(facts.stays)}.",
            "A person deletes it when it is no longer wanted. Everything else goes.",
        )
