"""The network interfaces of a node, EFA included, and the security rules that EFA needs.

The layout follows AWS's "Maximize network bandwidth on accelerated instances" (efa-acc-inst-types.html, 2026): card 0,
device 0 carries IP; EFA on card 0 sits beside it at device 1; every further card has one EFA interface at device 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aws_cdk import aws_ec2 as ec2

from constructs import Construct
from traincluster.instances import InstanceType, efa_sizes

InterfaceKind = Literal["interface", "efa", "efa-only"]


@dataclass(frozen=True, kw_only=True)
class EfaLayout:
    """How EFA interfaces are laid on a type that has several network cards.

    The default is AWS's current rule. The older rule, still found in the Neuron and ParallelCluster documentation, is
    ``EfaLayout(kind="efa", device_index=1)``: every interface carries IP as well and takes an address of the subnet.
    """

    kind: Literal["efa", "efa-only"] = "efa-only"
    device_index: Literal[0, 1] = 0
    """Device index on the cards after card 0. 0 is below the limit of every card; 1 needs two interfaces on each."""


@dataclass(frozen=True, kw_only=True)
class NetworkInterface:
    """One network interface of a node: where it sits and what it carries."""

    card: int
    device: int
    kind: InterfaceKind

    @property
    def carries_efa(self) -> bool:
        return self.kind != "interface"


def use_efa(instance_type: InstanceType, wanted: bool | None) -> bool:
    """Whether a node has EFA: as wanted, or, when that is None, if its type has it.

    Raises:
        ValueError: EFA is wanted on a type that has none.
    """
    if wanted and not instance_type.efa_cards:
        sizes = efa_sizes(instance_type.name.partition(".")[0])
        larger = f", or choose a type that has it: {', '.join(sizes)}" if sizes else ""
        raise ValueError(f"efa is true, but {instance_type.name} has no EFA. Set efa to false or leave it out{larger}.")
    return bool(instance_type.efa_cards) if wanted is None else wanted


def network_interfaces(
    instance_type: InstanceType, *, efa: bool, layout: EfaLayout | None = None
) -> tuple[NetworkInterface, ...]:
    """Every interface of a node, the primary one first.

    A type with one network card gets a single `efa` interface: it carries IP too, and spares one address. A card
    that takes a single interface cannot have EFA beside IP, so its EFA interface carries both.

    Raises:
        ValueError: the layout's device index is beyond what a card takes.
    """
    layout = layout or EfaLayout()
    if not efa:
        return (NetworkInterface(card=0, device=0, kind="interface"),)
    combined = instance_type.efa_on_card_0 and (
        instance_type.network_cards == 1 or instance_type.interfaces_per_card[0] == 1 or layout.kind == "efa"
    )
    interfaces = [NetworkInterface(card=0, device=0, kind="efa" if combined else "interface")]
    if instance_type.efa_on_card_0 and not combined:
        interfaces.append(NetworkInterface(card=0, device=1, kind="efa-only"))
    for card in instance_type.efa_cards:
        if card == 0:
            continue
        if layout.device_index >= instance_type.interfaces_per_card[card]:
            raise ValueError(
                f"The EFA layout puts an interface at device index {layout.device_index}, but network card {card} of "
                f"{instance_type.name} takes {instance_type.interfaces_per_card[card]}. Use device_index=0."
            )
        interfaces.append(NetworkInterface(card=card, device=layout.device_index, kind=layout.kind))
    return tuple(interfaces)


def render_interfaces(
    interfaces: tuple[NetworkInterface, ...], *, security_group_ids: list[str]
) -> list[ec2.CfnLaunchTemplate.NetworkInterfaceProperty]:
    """The interfaces as launch-template properties.

    The groups go on every interface, since EC2 refuses them at the top level beside interfaces. The subnet is left to
    the Auto Scaling group. A public address is refused where EC2 takes the option, that is with one interface; with
    several it assigns none and rejects the question.
    """
    return [
        ec2.CfnLaunchTemplate.NetworkInterfaceProperty(
            network_card_index=interface.card,
            device_index=interface.device,
            interface_type=interface.kind,
            groups=security_group_ids,
            delete_on_termination=True,
            associate_public_ip_address=False if len(interfaces) == 1 else None,
        )
        for interface in interfaces
    ]


def allow_traffic_among_members(scope: Construct, security_group: ec2.ISecurityGroup) -> tuple[Construct, ...]:
    """All traffic from the security group to itself, in and out.

    EFA needs both and does not count a rule for 0.0.0.0/0. The rules are L1 resources because
    ``SecurityGroup(allow_all_outbound=True)`` silently drops an egress rule to itself.

    Returns:
        The rules, for whatever must not start before they exist.
    """
    group = security_group.security_group_id
    ingress = ec2.CfnSecurityGroupIngress(
        scope,
        "AllTrafficFromMembers",
        group_id=group,
        source_security_group_id=group,
        ip_protocol="-1",
        description="All traffic among the nodes of the cluster",
    )
    egress = ec2.CfnSecurityGroupEgress(
        scope,
        "AllTrafficToMembers",
        group_id=group,
        destination_security_group_id=group,
        ip_protocol="-1",
        description="All traffic among the nodes of the cluster",
    )
    return (ingress, egress)
