"""What a cluster's nodes mount: the one face of every storage construct towards `TrainingCluster`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jsii
from aws_cdk import Stack
from aws_cdk import aws_ec2 as ec2

from constructs import Construct, IDependable
from traincluster.instances import InstanceType
from traincluster.rules import Finding, check
from traincluster.rules.storage import StorageFacts, VolumeFacts
from traincluster.volumes import DataVolume, device_names
from trainrun.spec import MountSpec, StorageSpec, VolumeSpec


@dataclass(frozen=True)
class Ports:
    """TCP ports from one to another; both None stand for all traffic of every protocol."""

    first: int | None = None
    last: int | None = None

    @property
    def protocol(self) -> str:
        return "-1" if self.first is None else "tcp"

    @property
    def label(self) -> str:
        if self.first is None:
            return "all traffic"
        return f"port {self.first}" if self.first == self.last else f"ports {self.first} to {self.last}"


@jsii.implements(ec2.IConnectable)
class FileSystem(Construct):
    """A shared file system: `LustreFileSystem`, `ElasticFileSystem`, or one of these taken by ``adopt``."""

    security_group: ec2.ISecurityGroup
    """The group of the file system's own interfaces."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        ports: tuple[Ports, ...],
        both_ways: bool,
    ) -> None:
        """Make the face; the file system itself, and its security group, is the subclass's.

        Args:
            scope: where the construct goes.
            construct_id: its id there.
            ports: where connections go.
            both_ways: whether the file system opens connections to its clients too, as Lustre does.
        """
        super().__init__(scope, construct_id)
        self._ports, self._both_ways = ports, both_ways

    @property
    def mount(self) -> MountSpec:
        """How a node mounts it."""
        raise NotImplementedError

    @property
    def ready(self) -> list[IDependable]:
        """What has to exist before a node mounts it."""
        return [self]

    @property
    def connections(self) -> ec2.Connections:
        """The file system's security group. A cluster that is given the file system connects the two by itself."""
        return ec2.Connections(security_groups=[self.security_group])

    def attach(self, scope: Construct, construct_id: str, security_group: ec2.ISecurityGroup) -> list[IDependable]:
        """Let the members of a security group reach it. To be called once for each group.

        The rules are made below ``scope``, the cluster, so that a file system in another stack does not depend on the
        cluster's. They name groups, not address ranges: EFA takes nothing else.

        Returns:
            What has to exist before a node mounts it.
        """
        holder = Construct(scope, construct_id)
        client, own = security_group.security_group_id, self.security_group.security_group_id
        rules = allow(holder, client, own, self._ports)
        if self._both_ways:
            rules += allow(Construct(holder, "Back"), own, client, self._ports)
        if Stack.of(scope) is Stack.of(self):
            self._created_after(rules)
        return [*rules, *self.ready]

    def _make_security_group(self, vpc: ec2.IVpc) -> ec2.SecurityGroup:
        return ec2.SecurityGroup(
            self, "SecurityGroup", vpc=vpc, description=f"File system {self.node.path}", allow_all_outbound=False
        )

    def _created_after(self, rules: Sequence[Construct]) -> None:
        """Make the file system only when these rules exist. FSx checks the ports when it makes one."""


def allow(scope: Construct, source: str, target: str, ports: tuple[Ports, ...]) -> list[Construct]:
    """Let members of one security group connect to those of another: rules on both, since both are closed otherwise."""
    rules: list[Construct] = []
    for number, port in enumerate(ports):
        rules.append(
            ec2.CfnSecurityGroupEgress(
                scope,
                f"Egress{number}",
                group_id=source,
                destination_security_group_id=target,
                description=f"Shared file system, {port.label}",
                ip_protocol=port.protocol,
                from_port=port.first,
                to_port=port.last,
            )
        )
        rules.append(
            ec2.CfnSecurityGroupIngress(
                scope,
                f"Ingress{number}",
                group_id=target,
                source_security_group_id=source,
                description=f"Shared file system, {port.label}",
                ip_protocol=port.protocol,
                from_port=port.first,
                to_port=port.last,
            )
        )
    return rules


def attach_all(scope: Construct, file_systems: Sequence[FileSystem], security_group: ec2.ISecurityGroup) -> list[IDependable]:
    """Let the nodes, members of ``security_group``, reach all file systems; returns what must exist before a node starts."""
    ready: list[IDependable] = []
    for number, file_system in enumerate(file_systems):
        ready.extend(file_system.attach(scope, f"FileSystem{number}", security_group))
    return ready


def storage_spec(
    *,
    location: str,
    file_systems: Sequence[FileSystem] = (),
    volumes: Sequence[DataVolume] = (),
    instance_store: str | None = None,
) -> StorageSpec:
    """The part of the RunSpec that tells a node what to mount.

    Args:
        location: URL under which runs keep everything.
        file_systems: shared file systems.
        volumes: EBS volumes besides the root volume.
        instance_store: where the instance store is mounted; None leaves it alone.
    """
    return StorageSpec(
        location=location,
        mounts=tuple(file_system.mount for file_system in file_systems),
        volumes=tuple(
            VolumeSpec(device=device, path=volume.path) for device, volume in zip(device_names(volumes), volumes, strict=True)
        ),
        instance_store=instance_store or "",
    )


def storage_findings(
    *,
    instance_type: InstanceType,
    efa: bool,
    file_systems: Sequence[FileSystem] = (),
    volumes: Sequence[DataVolume] = (),
    instance_store: str | None = None,
    root_volume_gib: int | None = None,
) -> list[Finding]:
    """What the storage rules find in what the nodes of a cluster mount.

    Args:
        instance_type: what a node is.
        efa: whether nodes have EFA.
        file_systems: shared file systems.
        volumes: EBS volumes besides the root volume.
        instance_store: where the instance store is mounted; None leaves it alone.
        root_volume_gib: size of the root volume, which is gp3.
    """
    mounts = [file_system.mount for file_system in file_systems]
    named = [
        *((f"the {'Lustre' if mount.type == 'lustre' else 'EFS'} file system", mount.path) for mount in mounts),
        *((f"the {volume.type} volume", volume.path) for volume in volumes),
        *((("the instance store", instance_store),) if instance_store is not None else ()),
    ]
    facts = StorageFacts(
        instance_type=instance_type.name,
        mount_paths=tuple(named),
        volumes=len(volumes),
        instance_store=instance_store is not None,
        local_disks=instance_type.local_disks,
        nitro_version=instance_type.nitro_version,
        uses_efa=efa,
        lustre_over_efa=tuple(mount.path for mount in mounts if mount.efa),
    )
    findings = list(check(facts))
    for volume in volumes:
        findings += check(
            VolumeFacts(
                path=volume.path,
                type=volume.type,
                size_gib=volume.size_gib,
                iops=volume.iops,
                throughput_mib_s=volume.throughput_mib_s,
                instance_type=instance_type.name,
                xen=instance_type.xen,
            )
        )
    if root_volume_gib is not None:
        root = VolumeFacts(
            path="/", type="gp3", size_gib=root_volume_gib, instance_type=instance_type.name, xen=instance_type.xen
        )
        findings += check(root)
    return findings
