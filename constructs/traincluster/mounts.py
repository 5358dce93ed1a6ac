"""What a cluster's nodes mount: the one face of every storage construct towards `TrainingCluster`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aws_cdk import aws_ec2 as ec2

from constructs import Construct, IDependable
from traincluster.volumes import DataVolume, device_names
from trainrun.spec import MountSpec, StorageSpec, VolumeSpec


class FileSystem(Protocol):
    """A shared file system: `LustreFileSystem`, `ElasticFileSystem`, or one of these taken by `adopt`."""

    @property
    def mount(self) -> MountSpec:
        """How a node mounts it."""
        ...

    def attach(self, scope: Construct, construct_id: str, security_group: ec2.ISecurityGroup) -> Sequence[IDependable]:
        """Let the members of a security group reach it. To be called once for each group.

        The rules are made below ``scope``, the cluster, so that a file system in another stack does not depend on the
        cluster's.

        Returns:
            What has to exist before a node mounts it.
        """
        ...


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
            VolumeSpec(device=device, path=volume.path)
            for device, volume in zip(device_names(volumes), volumes, strict=True)
        ),
        instance_store=instance_store or "",
    )
