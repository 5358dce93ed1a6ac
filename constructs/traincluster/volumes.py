"""The EBS volumes of a node: the root volume, and data volumes beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_kms as kms

VolumeType = Literal["gp3", "io2"]

FIRST_DEVICE = "f"
"""EC2 advises /dev/sd[f-p] for EBS volumes (docs.aws.amazon.com/AWSEC2/latest/UserGuide/device_naming.html)."""


@dataclass(frozen=True, kw_only=True)
class DataVolume:
    """An EBS volume besides the root volume; every node gets one of its own.

    Encrypted always. Deleted with the instance unless ``keep`` is set.

    Example:
        >>> DataVolume(size_gib=1000, path="/data").type
        'gp3'
        >>> DataVolume.checkpoints(size_gib=500).iops
        32000
    """

    size_gib: int
    """Size in GiB."""
    path: str
    """Where the node mounts it, such as "/data"."""
    type: VolumeType = "gp3"
    """gp3, or io2, which is io2 Block Express on every instance that is built on Nitro."""
    iops: int | None = None
    """Input and output operations per second; None means gp3's 3,000. Needed for io2."""
    throughput_mib_s: int | None = None
    """Throughput in MiB/s; None means gp3's 125. io2 has none to set."""
    encryption_key: kms.IKey | None = None
    """Key to encrypt with; None means the account's key for EBS."""
    keep: bool = False
    """Whether the volume stays, and is paid for, when its instance ends."""

    @classmethod
    def checkpoints(
        cls,
        *,
        size_gib: int,
        path: str = "/checkpoints",
        iops: int = 32_000,
        encryption_key: kms.IKey | None = None,
        keep: bool = False,
    ) -> DataVolume:
        """An io2 volume for checkpoints that are read again on the same node: low latency, durability of 99.999%."""
        return cls(size_gib=size_gib, path=path, type="io2", iops=iops, encryption_key=encryption_key, keep=keep)


def device_names(volumes: Sequence[DataVolume]) -> list[str]:
    """The device names of the volumes in the launch template, in order."""
    return [f"/dev/sd{chr(ord(FIRST_DEVICE) + number)}" for number in range(len(volumes))]


def block_device_mappings(
    *,
    root_device: str,
    root_volume_gib: int,
    volumes: Sequence[DataVolume] = (),
    encryption_key: kms.IKey | None = None,
) -> list[ec2.CfnLaunchTemplate.BlockDeviceMappingProperty]:
    """The block device mappings of a launch template: the root volume (gp3), then the data volumes.

    Tags come from the template's own tag specification for volumes.

    Args:
        root_device: device name of the image's root volume.
        root_volume_gib: its size in GiB.
        volumes: data volumes.
        encryption_key: key of the root volume; None means the account's key for EBS.
    """
    root = ec2.CfnLaunchTemplate.EbsProperty(
        volume_size=root_volume_gib,
        volume_type="gp3",
        encrypted=True,
        kms_key_id=encryption_key.key_arn if encryption_key else None,
        delete_on_termination=True,
    )
    data = [
        ec2.CfnLaunchTemplate.EbsProperty(
            volume_size=volume.size_gib,
            volume_type=volume.type,
            iops=volume.iops,
            throughput=volume.throughput_mib_s,
            encrypted=True,
            kms_key_id=volume.encryption_key.key_arn if volume.encryption_key else None,
            delete_on_termination=not volume.keep,
        )
        for volume in volumes
    ]
    return [
        ec2.CfnLaunchTemplate.BlockDeviceMappingProperty(device_name=device, ebs=ebs)
        for device, ebs in zip([root_device, *device_names(volumes)], [root, *data], strict=True)
    ]
