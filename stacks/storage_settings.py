"""The settings of what nodes store things on: EBS volumes and shared file systems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from traincluster.volumes import DataVolume


@dataclass(frozen=True, kw_only=True)
class VolumeSettings:
    """One EBS volume of each node, besides its root volume."""

    size_gib: int
    """Size in GiB."""
    path: str
    """Where the node mounts it, such as "/data"."""
    type: Literal["gp3", "io2"] = "gp3"
    """gp3, or io2 (Block Express on Nitro types), which needs iops."""
    iops: int | None = None
    """Operations per second; null means gp3's 3,000."""
    throughput_mib_s: int | None = None
    """Throughput in MiB/s, of gp3; null means 125."""
    keep: bool = False
    """true leaves the volume, which is then paid for, when its node ends."""

    @property
    def volume(self) -> DataVolume:
        return DataVolume(
            size_gib=self.size_gib,
            path=self.path,
            type=self.type,
            iops=self.iops,
            throughput_mib_s=self.throughput_mib_s,
            keep=self.keep,
        )
