"""How people reach a node: Session Manager always, SSH only where it is asked for."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from aws_cdk import aws_ec2 as ec2

SSH_PORT = 22


@dataclass(frozen=True, kw_only=True)
class SshAccess:
    """SSH to the nodes, for those who cannot use Session Manager.

    Example:
        >>> SshAccess(sources=["10.20.0.0/16"], key_pair="team").sources
        ('10.20.0.0/16',)
    """

    sources: Sequence[str]
    """IPv4 ranges that SSH is let in from, such as a VPN's. Nodes have no public address."""
    key_pair: str
    """Name of an EC2 key pair of the account. Ubuntu 22.04 and later take no RSA key with SHA-1: use ED25519."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError(
                "ssh_from is empty, but a key pair is given. Give the ranges that SSH comes from, or leave both out."
            )
        for source in self.sources:
            _check_range(source)
        if not self.key_pair:
            raise ValueError(
                "ssh_key_pair is empty. Give the name of an EC2 key pair, or leave SSH out: Session Manager needs none."
            )
        object.__setattr__(self, "sources", tuple(self.sources))

    def allow(self, group: ec2.SecurityGroup) -> None:
        """Let SSH into a security group from the given ranges, and from nowhere else."""
        for source in self.sources:
            group.add_ingress_rule(ec2.Peer.ipv4(source), ec2.Port.tcp(SSH_PORT), f"SSH from {source}")


def _check_range(source: str) -> None:
    try:
        ipaddress.IPv4Network(source)
    except ValueError:
        raise ValueError(
            f"ssh_from holds {source!r}. Allowed: IPv4 ranges whose address is the first of the range, such as '10.20.0.0/16'."
        ) from None


def session_command(group_name: str) -> str:
    """The command that opens a shell on the first node of an Auto Scaling group by Session Manager."""
    return f"aws ssm start-session --target {_first_node(group_name)}"


def forwarding_command(group_name: str, port: int) -> str:
    """The command that forwards a port of the first node to the same port of the own machine by Session Manager."""
    parameters = f'{{"portNumber":["{port}"],"localPortNumber":["{port}"]}}'
    return (
        f"aws ssm start-session --target {_first_node(group_name)} "
        f"--document-name AWS-StartPortForwardingSession --parameters '{parameters}'"
    )


def _first_node(group_name: str) -> str:
    return (
        "$(aws autoscaling describe-auto-scaling-groups "
        f"--auto-scaling-group-names {group_name} --query 'AutoScalingGroups[0].Instances[0].InstanceId' --output text)"
    )
