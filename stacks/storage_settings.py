"""The settings of what nodes store things on: EBS volumes and shared file systems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from aws_cdk import RemovalPolicy

from constructs import Construct

if TYPE_CHECKING:  # each is imported when it is used, since each brings a module of aws_cdk that takes its time at synth
    from aws_cdk import aws_s3 as s3

    from traincluster import DataVolume, ElasticFileSystem, LustreFileSystem, TrainingNetwork


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
        from traincluster import DataVolume

        return DataVolume(
            size_gib=self.size_gib,
            path=self.path,
            type=self.type,
            iops=self.iops,
            throughput_mib_s=self.throughput_mib_s,
            keep=self.keep,
        )


@dataclass(frozen=True, kw_only=True)
class LustreSettings:
    """An FSx for Lustre file system, made and deleted with the cluster."""

    path: str = "/fsx"
    """Where nodes mount it."""
    deployment: Literal["SCRATCH_2", "PERSISTENT_1", "PERSISTENT_2"] = "PERSISTENT_2"
    storage: Literal["SSD", "HDD", "INTELLIGENT_TIERING"] = "SSD"
    capacity_gib: int | None = None
    """Capacity in GiB: 1200, or a multiple of 2400 (SSD). Intelligent-Tiering has none."""
    throughput_per_tib: int | None = None
    """MB/s per TiB of a persistent file system; null means the least."""
    throughput: int | None = None
    """MB/s in all, of Intelligent-Tiering."""
    metadata_iops: int | None = None
    """Metadata operations per second; null lets FSx choose."""
    efa: bool = False
    """Whether nodes reach it by EFA."""
    link_datasets: bool = False
    """Whether its files are the objects of the dataset bucket, both ways."""
    keep: bool = False
    """true leaves the file system, which is then paid for, when the cluster is destroyed."""

    def make(self, scope: Construct, construct_id: str, *, network: TrainingNetwork, datasets: s3.IBucket) -> LustreFileSystem:
        """The file system, in the nodes' network."""
        from traincluster import LustreFileSystem

        return LustreFileSystem(
            scope,
            construct_id,
            network=network,
            path=self.path,
            deployment=self.deployment,
            storage=self.storage,
            capacity_gib=self.capacity_gib,
            throughput_per_tib=self.throughput_per_tib,
            throughput=self.throughput,
            metadata_iops=self.metadata_iops,
            efa=self.efa,
            linked_bucket=datasets if self.link_datasets else None,
            removal_policy=RemovalPolicy.RETAIN if self.keep else RemovalPolicy.DESTROY,
        )


@dataclass(frozen=True, kw_only=True)
class EfsSettings:
    """An EFS file system."""

    path: str = "/efs"
    """Where nodes mount it."""
    encrypt_in_transit: bool = False
    """Whether nodes mount it over TLS, which needs amazon-efs-utils on their image."""
    keep: bool = True
    """false deletes the file system, with its files, when the cluster is destroyed."""

    def make(self, scope: Construct, construct_id: str, *, network: TrainingNetwork) -> ElasticFileSystem:
        """The file system, in the nodes' network."""
        from traincluster import ElasticFileSystem

        return ElasticFileSystem(
            scope,
            construct_id,
            network=network,
            path=self.path,
            encrypt_in_transit=self.encrypt_in_transit,
            removal_policy=RemovalPolicy.RETAIN if self.keep else RemovalPolicy.DESTROY,
        )
