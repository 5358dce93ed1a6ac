"""FSx for Lustre: a parallel file system beside the nodes, by TCP or EFA, linked with S3 where asked."""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass

from aws_cdk import Aws, CfnDeletionPolicy, CfnOutput, CfnResource, CfnTag, RemovalPolicy, Stack
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_fsx as fsx
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3

from constructs import Construct, IDependable
from traincluster.mounts import FileSystem, Ports, allow
from traincluster.network import TrainingNetwork
from traincluster.rules import check
from traincluster.rules.lustre import Deployment, LustreFacts, LustreStorage
from traincluster.rules.report import known, report
from trainrun.spec import MountSpec

LUSTRE_PORTS = (Ports(988, 988), Ports(1018, 1023))
"""docs.aws.amazon.com/fsx/latest/LustreGuide/limit-access-security-groups.html"""
EFA_PORTS = (Ports(),)

LUSTRE_VERSION = "2.15"
"""FSx's own default, 2.10, cannot be linked with S3 and is refused for PERSISTENT_2."""

DEFAULT_THROUGHPUT = {"PERSISTENT_1": {"SSD": 50, "HDD": 12}, "PERSISTENT_2": {"SSD": 125}}
"""The least of each, in MB/s per TiB. FSx has no default for persistent file systems and wants the property there."""


@dataclass(frozen=True, kw_only=True)
class DataRepository:
    """A link between a folder of a Lustre file system and a bucket.

    Files appear in the folder as soon as objects do in the bucket, and are fetched when they are first read.
    """

    bucket: s3.IBucket
    prefix: str = ""
    """Folder of the bucket, such as "corpus/web"; "" links the whole bucket."""
    path: str = "/"
    """Folder of the file system; "/" links the whole of it."""
    imports: bool = True
    """Whether new, changed and deleted objects show in the file system."""
    exports: bool = True
    """Whether new, changed and deleted files go to the bucket."""

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ValueError(f"path of a data repository is {self.path!r}. Give a folder of the file system, such as '/corpus'.")
        if not self.imports and not self.exports:
            raise ValueError(
                f"The data repository at {self.path} neither imports nor exports. Set one of the two, or leave it out."
            )


class _Lustre(FileSystem):
    """What made and adopted Lustre file systems have in common."""

    file_system_id: str
    dns_name: str
    mount_name: str

    def __init__(self, scope: Construct, construct_id: str, *, path: str, efa: bool) -> None:
        super().__init__(scope, construct_id, ports=EFA_PORTS if efa else LUSTRE_PORTS, both_ways=True)
        self.path, self.efa = path, efa

    @property
    def mount(self) -> MountSpec:
        source = f"{self.dns_name}@tcp:/{self.mount_name}"
        return MountSpec(type="lustre", source=source, path=self.path, efa=self.efa)


class LustreFileSystem(_Lustre):
    """An FSx for Lustre file system in the network of the nodes.

    It is deleted with its stack unless ``removal_policy`` is RETAIN, and synth warns when that loses files. When a change
    of a setting makes CloudFormation replace a persistent one, the old file system always stays, with its files.

    Example:
        >>> LustreFileSystem(stack, "Fsx", network=network, capacity_gib=4800, linked_bucket=corpus)     # doctest: +SKIP
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        network: TrainingNetwork,
        path: str = "/fsx",
        deployment: Deployment = "PERSISTENT_2",
        storage: LustreStorage = "SSD",
        capacity_gib: int | None = None,
        throughput_per_tib: int | None = None,
        throughput: int | None = None,
        read_cache_gib: int | None = None,
        metadata_iops: int | None = None,
        efa: bool = False,
        compression: bool = True,
        linked_bucket: s3.IBucket | None = None,
        repositories: Sequence[DataRepository] = (),
        encryption_key: kms.IKey | None = None,
        removal_policy: RemovalPolicy = RemovalPolicy.DESTROY,
    ) -> None:
        """Make the file system.

        Args:
            scope: where the construct goes.
            construct_id: its id there.
            network: where the nodes are; the file system is in the same subnet.
            path: where nodes mount it.
            deployment: "PERSISTENT_2"; "PERSISTENT_1", older; or "SCRATCH_2", which keeps one copy of each file.
            storage: "SSD"; "HDD" (PERSISTENT_1); or "INTELLIGENT_TIERING" (PERSISTENT_2), which has no fixed capacity.
            capacity_gib: capacity in GiB: 1200, or a multiple of 2400 (SSD).
            throughput_per_tib: MB/s per TiB of capacity; None means the least. PERSISTENT_2: 125, 250, 500 or 1000.
            throughput: MB/s in all, for Intelligent-Tiering: 1000, 2000 or a multiple of 4000.
            read_cache_gib: SSD cache of Intelligent-Tiering in GiB; None sizes it by the throughput, 0 means none.
            metadata_iops: metadata operations per second (PERSISTENT_2): 1500, 3000, 6000 or a multiple of 12000; None
                has FSx choose by the size.
            efa: whether nodes reach it by EFA, which takes a type with EFA on Nitro v4 or later, other than Trn2. It cannot
                be changed afterwards.
            compression: whether FSx compresses files (LZ4), which saves capacity and takes nothing from the nodes.
            linked_bucket: a bucket to link the whole file system with, both ways.
            repositories: folders to link with buckets, at most 8.
            encryption_key: key of a persistent file system; None means the account's key for FSx.
            removal_policy: what becomes of it when it leaves the stack: DESTROY or RETAIN.

        Raises:
            ValueError: an unknown deployment, storage or removal policy.
        """
        _check_choices(deployment=deployment, storage=storage, removal_policy=removal_policy)
        if throughput_per_tib is None:
            throughput_per_tib = DEFAULT_THROUGHPUT.get(deployment, {}).get(storage)
        super().__init__(scope, construct_id, path=path, efa=efa)
        self.security_group = self._make_security_group(network.vpc)
        group = self.security_group.security_group_id
        own = allow(Construct(self, "OwnTraffic"), group, group, self._ports)
        if linked_bucket is not None:
            repositories = [DataRepository(bucket=linked_bucket), *repositories]
        is_tiered = storage == "INTELLIGENT_TIERING"
        self.resource = fsx.CfnFileSystem(
            self,
            "Resource",
            file_system_type="LUSTRE",
            file_system_type_version=LUSTRE_VERSION,
            storage_type=storage,
            storage_capacity=capacity_gib,
            subnet_ids=[network.subnet.subnet_id],
            security_group_ids=[self.security_group.security_group_id],
            kms_key_id=encryption_key.key_arn if encryption_key else None,
            lustre_configuration=fsx.CfnFileSystem.LustreConfigurationProperty(
                deployment_type=deployment,
                per_unit_storage_throughput=throughput_per_tib,
                throughput_capacity=throughput,
                data_read_cache_configuration=_read_cache(read_cache_gib) if is_tiered else None,
                metadata_configuration=_metadata(metadata_iops) if deployment == "PERSISTENT_2" else None,
                # FSx asks for it with HDD; a cache in front of the disks would be paid for on top.
                drive_cache_type="NONE" if storage == "HDD" else None,
                efa_enabled=True if efa else None,
                data_compression_type="LZ4" if compression else "NONE",
            ),
            tags=[CfnTag(key="Name", value=self.node.path)],
        )
        self._created_after(own)
        self.file_system_id = self.resource.ref
        self.dns_name = self.resource.attr_dns_name
        self.mount_name = self.resource.attr_lustre_mount_name
        self.associations = self._link(repositories)
        self._set_removal(deployment, removal_policy)
        report(
            self,
            check(
                LustreFacts(
                    name=self.node.path,
                    deployment=deployment,
                    storage=storage,
                    capacity_gib=known(capacity_gib),
                    capacity_is_known=capacity_gib is None or known(capacity_gib) is not None,
                    throughput_per_tib=throughput_per_tib,
                    throughput=throughput,
                    read_cache_gib=read_cache_gib,
                    metadata_iops=metadata_iops,
                    efa=efa,
                    has_key=encryption_key is not None,
                    repositories=tuple(one.path for one in repositories),
                    exported=tuple(one.path for one in repositories if one.exports),
                    is_deleted=removal_policy == RemovalPolicy.DESTROY,
                    is_in_stack_of_network=Stack.of(network.subnet) is Stack.of(self),
                )
            ),
        )

    @classmethod
    def adopt(
        cls,
        scope: Construct,
        construct_id: str,
        *,
        file_system_id: str,
        mount_name: str,
        security_group: ec2.ISecurityGroup,
        path: str = "/fsx",
        efa: bool = False,
    ) -> FileSystem:
        """Take a file system that exists.

        Args:
            scope: where the construct goes.
            construct_id: its id there.
            file_system_id: its id, "fs-...".
            mount_name: its mount name, as `aws fsx describe-file-systems` shows it (LustreConfiguration.MountName).
            security_group: the group of its interfaces, to which the cluster adds rules.
            path: where nodes mount it.
            efa: whether it is EFA-enabled.

        Raises:
            ValueError: not the id of a file system, or no mount name.
        """
        if known(file_system_id) is not None and not re.fullmatch(r"fs-[0-9a-f]{8,17}", file_system_id):
            raise ValueError(
                f"file_system_id is {file_system_id!r}. Give the id of a file system, such as 'fs-0123456789abcdef0'."
            )
        if known(mount_name) is not None and not re.fullmatch(r"[A-Za-z0-9_]{1,8}", mount_name):
            raise ValueError(
                f"mount_name is {mount_name!r}. Give what `aws fsx describe-file-systems` shows as MountName, such as 'fsx' or "
                "'2p3fhbmv'."
            )
        adopted = _Lustre(scope, construct_id, path=path, efa=efa)
        adopted.security_group = security_group
        adopted.file_system_id, adopted.mount_name = file_system_id, mount_name
        adopted.dns_name = f"{file_system_id}.fsx.{Stack.of(scope).region}.{Aws.URL_SUFFIX}"
        return adopted

    @property
    def ready(self) -> list[IDependable]:
        """The file system, and its links: before they exist, nodes would find its folders empty."""
        return [self.resource, *self.associations]

    def add_export_command(self) -> CfnOutput:
        """Add a stack output with the command that copies every changed file to S3 before the file system is deleted."""
        if not self.associations:
            raise ValueError(f"{self.node.path} is linked with no bucket. Set linked_bucket or repositories.")
        return CfnOutput(
            self,
            "ExportCommand",
            value=(
                f"aws fsx create-data-repository-task --type EXPORT_TO_REPOSITORY --file-system-id {self.file_system_id} "
                "--report Enabled=false"
            ),
            description="Copies what is not on S3 yet; run it, and wait for its end, before the stack is destroyed",
        )

    def _created_after(self, rules: Sequence[Construct]) -> None:
        self.resource.node.add_dependency(*rules)

    def _set_removal(self, deployment: Deployment, removal_policy: RemovalPolicy) -> None:
        stays = removal_policy == RemovalPolicy.RETAIN
        options = self.resource.cfn_options
        options.deletion_policy = CfnDeletionPolicy.RETAIN if stays else CfnDeletionPolicy.DELETE
        scratch = deployment == "SCRATCH_2" and not stays
        options.update_replace_policy = CfnDeletionPolicy.DELETE if scratch else CfnDeletionPolicy.RETAIN
        if stays:  # with it stay its interfaces, and with them their group and its rules; its links too
            for child in self.node.find_all():
                if isinstance(child, CfnResource) and child is not self.resource:
                    child.apply_removal_policy(RemovalPolicy.RETAIN)

    def _link(self, repositories: Sequence[DataRepository]) -> list[fsx.CfnDataRepositoryAssociation]:
        associations: list[fsx.CfnDataRepositoryAssociation] = []
        events = ["NEW", "CHANGED", "DELETED"]
        for number, one in enumerate(repositories):
            association = fsx.CfnDataRepositoryAssociation(
                self,
                f"Repository{number}",
                file_system_id=self.resource.ref,
                file_system_path=one.path,
                data_repository_path=f"s3://{one.bucket.bucket_name}/{one.prefix.strip('/')}".rstrip("/"),
                batch_import_meta_data_on_create=one.imports,
                s3=fsx.CfnDataRepositoryAssociation.S3Property(
                    auto_import_policy=fsx.CfnDataRepositoryAssociation.AutoImportPolicyProperty(events=events)
                    if one.imports
                    else None,
                    auto_export_policy=fsx.CfnDataRepositoryAssociation.AutoExportPolicyProperty(events=events)
                    if one.exports
                    else None,
                ),
            )
            if associations:  # FSx makes one at a time
                association.add_dependency(associations[-1])
            if one.bucket.encryption_key is not None:
                _let_fsx_use(one.bucket.encryption_key, Stack.of(self))
            associations.append(association)
        return associations


def _read_cache(gib: int | None) -> fsx.CfnFileSystem.DataReadCacheConfigurationProperty:
    if gib is None:
        return fsx.CfnFileSystem.DataReadCacheConfigurationProperty(sizing_mode="PROPORTIONAL_TO_THROUGHPUT_CAPACITY")
    if gib == 0:
        return fsx.CfnFileSystem.DataReadCacheConfigurationProperty(sizing_mode="NO_CACHE")
    return fsx.CfnFileSystem.DataReadCacheConfigurationProperty(sizing_mode="USER_PROVISIONED", size_gib=gib)


def _metadata(iops: int | None) -> fsx.CfnFileSystem.MetadataConfigurationProperty:
    if iops is None:
        return fsx.CfnFileSystem.MetadataConfigurationProperty(mode="AUTOMATIC")
    return fsx.CfnFileSystem.MetadataConfigurationProperty(mode="USER_PROVISIONED", iops=iops)


def _let_fsx_use(key: kms.IKey, stack: Stack) -> None:
    """Let FSx's service-linked roles of the account use the key of a linked bucket, through S3 alone.

    A role comes into being with its link, so the policy can name it by a pattern only; it names no bucket, because the
    bucket names the key (docs.aws.amazon.com/fsx/latest/LustreGuide/s3-server-side-encryption-support.html).
    """
    role = "role/aws-service-role/s3.data-source.lustre.fsx.amazonaws.com/AWSServiceRoleForFSxS3Access_*"
    key.add_to_resource_policy(
        iam.PolicyStatement(
            sid="LetFSxLinkBuckets",
            principals=[iam.AnyPrincipal()],
            actions=["kms:Decrypt", "kms:DescribeKey", "kms:Encrypt", "kms:GenerateDataKey*", "kms:ReEncrypt*"],
            resources=["*"],
            conditions={
                "StringEquals": {"kms:CallerAccount": stack.account, "kms:ViaService": f"s3.{stack.region}.amazonaws.com"},
                "ArnLike": {"aws:PrincipalArn": f"arn:{Aws.PARTITION}:iam::{stack.account}:{role}"},
            },
        )
    )


def _check_choices(*, deployment: Deployment, storage: LustreStorage, removal_policy: RemovalPolicy) -> None:
    for name, value, kind in (("deployment", deployment, Deployment), ("storage", storage, LustreStorage)):
        allowed = typing.get_args(kind)
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}. Allowed: {', '.join(map(repr, allowed))}.")
    if removal_policy not in (RemovalPolicy.DESTROY, RemovalPolicy.RETAIN):
        raise ValueError(f"removal_policy is {removal_policy.name}. FSx for Lustre takes DESTROY or RETAIN.")
