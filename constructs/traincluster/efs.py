"""EFS: a file system for code, environments and home folders, which grows with its files."""

from __future__ import annotations

import re

from aws_cdk import Aws, CfnDeletionPolicy, RemovalPolicy, Stack
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_efs as efs
from aws_cdk import aws_kms as kms

from constructs import Construct, IDependable
from traincluster.mounts import FileSystem, Ports
from traincluster.network import TrainingNetwork
from traincluster.rules import check
from traincluster.rules.report import known, report
from traincluster.rules.storage import ElasticFacts
from trainrun.spec import MountSpec

NFS_PORT = 2049


class _Elastic(FileSystem):
    """What made and adopted EFS file systems have in common."""

    file_system_id: str

    def __init__(self, scope: Construct, construct_id: str, *, path: str, encrypt_in_transit: bool) -> None:
        super().__init__(scope, construct_id, ports=(Ports(NFS_PORT, NFS_PORT),), both_ways=False)
        self.path, self.encrypt_in_transit = path, encrypt_in_transit

    @property
    def mount(self) -> MountSpec:
        if self.encrypt_in_transit:
            return MountSpec(type="efs", source=f"{self.file_system_id}:/", path=self.path, options="tls")
        name = f"{self.file_system_id}.efs.{Stack.of(self).region}.{Aws.URL_SUFFIX}"
        return MountSpec(type="nfs4", source=f"{name}:/", path=self.path)


class ElasticFileSystem(_Elastic):
    """An EFS file system in the zone of the nodes: encrypted, with elastic throughput.

    It costs by what is stored, and stays when its stack is destroyed unless ``removal_policy`` is DESTROY: its mount
    target, which is in the network, goes, and the files can be adopted by the next stack.

    Example:
        >>> ElasticFileSystem(stack, "Home", network=network, path="/shared")         # doctest: +SKIP
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        network: TrainingNetwork,
        path: str = "/efs",
        encryption_key: kms.IKey | None = None,
        encrypt_in_transit: bool = False,
        removal_policy: RemovalPolicy = RemovalPolicy.RETAIN,
    ) -> None:
        """Make the file system and its mount target in the subnet of the nodes.

        Args:
            scope: where the construct goes.
            construct_id: its id there.
            network: where the nodes are.
            path: where nodes mount it.
            encryption_key: key to encrypt with; None means the account's key for EFS.
            encrypt_in_transit: whether nodes mount it over TLS, which needs amazon-efs-utils on their image; without it
                they use the kernel's NFS client, and the traffic stays inside the VPC.
            removal_policy: what becomes of it when it leaves the stack: RETAIN or DESTROY.

        Raises:
            ValueError: another removal policy.
        """
        if removal_policy not in (RemovalPolicy.DESTROY, RemovalPolicy.RETAIN):
            raise ValueError(f"removal_policy is {removal_policy.name}. EFS takes RETAIN or DESTROY.")
        super().__init__(scope, construct_id, path=path, encrypt_in_transit=encrypt_in_transit)
        self.security_group = self._make_security_group(network.vpc)
        self.resource = efs.CfnFileSystem(
            self,
            "Resource",
            encrypted=True,
            kms_key_id=encryption_key.key_arn if encryption_key else None,
            throughput_mode="elastic",
            performance_mode="generalPurpose",
            file_system_tags=[efs.CfnFileSystem.ElasticFileSystemTagProperty(key="Name", value=self.node.path)],
        )
        stays = removal_policy == RemovalPolicy.RETAIN
        self.resource.cfn_options.deletion_policy = CfnDeletionPolicy.RETAIN if stays else CfnDeletionPolicy.DELETE
        self.resource.cfn_options.update_replace_policy = CfnDeletionPolicy.RETAIN
        self.file_system_id = self.resource.ref
        self.mount_target = efs.CfnMountTarget(
            self,
            "MountTarget",
            file_system_id=self.file_system_id,
            subnet_id=network.subnet.subnet_id,
            security_groups=[self.security_group.security_group_id],
        )
        report(self, check(ElasticFacts(name=self.node.path, is_deleted=not stays)))

    @classmethod
    def adopt(
        cls,
        scope: Construct,
        construct_id: str,
        *,
        file_system_id: str,
        security_group: ec2.ISecurityGroup,
        path: str = "/efs",
        encrypt_in_transit: bool = False,
    ) -> FileSystem:
        """Take a file system that exists and has a mount target in the zone of the nodes.

        Args:
            scope: where the construct goes.
            construct_id: its id there.
            file_system_id: its id, "fs-...".
            security_group: the group of its mount target, to which the cluster adds rules.
            path: where nodes mount it.
            encrypt_in_transit: whether nodes mount it over TLS.

        Raises:
            ValueError: not the id of a file system.
        """
        if known(file_system_id) is not None and not re.fullmatch(r"fs-[0-9a-f]{8,17}", file_system_id):
            raise ValueError(
                f"file_system_id is {file_system_id!r}. Give the id of a file system, such as 'fs-0123456789abcdef0'."
            )
        adopted = _Elastic(scope, construct_id, path=path, encrypt_in_transit=encrypt_in_transit)
        adopted.security_group, adopted.file_system_id = security_group, file_system_id
        return adopted

    @property
    def ready(self) -> list[IDependable]:
        """The mount target: without it the file system's name does not resolve."""
        return [self.mount_target]
