"""TrainingClusterStack: all that a run needs and nothing that should outlive it."""

from __future__ import annotations

from typing import Any

from aws_cdk import CfnOutput, Environment, Stack
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3 as s3

from constructs import Construct
from stacks.settings import Settings
from traincluster import CheckpointBucket, DatasetBucket, NotificationTopic, TrainingCluster, TrainingJob, TrainingNetwork
from traincluster.access import forwarding_command, session_command
from traincluster.mounts import FileSystem

FORWARDED_PORTS = {"Jupyter": 8888, "TensorBoard": 6006}
"""What a person may look at on a node: the port that each listens at by default."""


class TrainingClusterStack(Stack):
    """A network, the nodes in it and their logs, for one run.

    `cdk destroy` of this stack ends all that costs by the hour. The next deploy finds the checkpoints in the data stack's
    bucket and resumes.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        settings: Settings,
        checkpoints: CheckpointBucket,
        datasets: DatasetBucket,
    ) -> None:
        super().__init__(
            scope,
            construct_id,
            description=f"Traincluster: the nodes of the run {settings.run}",
            env=Environment(region=settings.region),
        )
        self.network = TrainingNetwork(
            self,
            "Network",
            availability_zone=settings.availability_zone,
            instance_type=settings.instance_type,
            isolated=settings.isolated,
            cidr=settings.cidr,
            flow_logs=settings.flow_log_retention,
        )
        self.cluster = TrainingCluster(
            self,
            "Cluster",
            network=self.network,
            instance_type=settings.instance_type,
            nodes=settings.nodes,
            min_nodes=settings.min_nodes,
            start_nodes=settings.start_nodes,
            processes_per_node=settings.processes_per_node,
            termination_hook=settings.termination_hook,
            bandwidth_check=settings.bandwidth_check,
            capacity=settings.parsed_capacity,
            efa=settings.efa,
            efa_layout=settings.parsed_efa_layout,
            placement_group=self._placement_group(settings.placement_group),
            image=settings.image,
            root_volume_gib=settings.root_volume_gib,
            volumes=[one.volume for one in settings.volumes],
            file_systems=self._file_systems(settings, datasets),
            instance_store=settings.instance_store,
            permissions_boundary=self._permissions_boundary(settings.permissions_boundary),
            ssh=settings.ssh,
            log_retention=settings.log_retention,
            metrics_namespace=settings.metrics_namespace,
            readiness=settings.parsed_readiness,
            notify=NotificationTopic(self, "Notifications", email=settings.notify) if settings.notify is not None else None,
            job=TrainingJob(
                run=settings.run,
                source=settings.source,
                entry_point=settings.entry_point,
                launcher=settings.launcher,
                arguments=settings.arguments,
                environment=settings.environment,
                configuration=self._configuration(settings, datasets),
                timeouts=settings.timeouts,
                shutdown=settings.shutdown,
                publish_seconds=settings.publish_seconds,
                numa=settings.numa,
                stop_signal=settings.stop_signal,
                container=settings.container,
                container_python=settings.container_python,
                requirements=settings.requirements,
                conda=settings.conda,
            ),
            checkpoints=checkpoints,
        )
        self._let_read_data(settings, datasets)
        self._add_outputs()

    def _placement_group(self, wanted: bool | str | None) -> bool | ec2.IPlacementGroup | None:
        if isinstance(wanted, str):
            return ec2.PlacementGroup.from_placement_group_name(self, "PlacementGroup", wanted)
        return wanted

    def _permissions_boundary(self, name: str | None) -> iam.IManagedPolicy | None:
        return None if name is None else iam.ManagedPolicy.from_managed_policy_name(self, "PermissionsBoundary", name)

    def _file_systems(self, settings: Settings, datasets: DatasetBucket) -> list[FileSystem]:
        made: list[FileSystem] = []
        if settings.lustre is not None:
            made.append(settings.lustre.make(self, "Lustre", network=self.network, datasets=datasets))
        if settings.efs is not None:
            made.append(settings.efs.make(self, "Efs", network=self.network))
        return made

    def _configuration(self, settings: Settings, datasets: DatasetBucket) -> dict[str, Any]:
        if settings.data is None:
            return settings.training
        is_url = settings.data.startswith("s3://")
        return {**settings.training, "data": settings.data if is_url else f"s3://{datasets.bucket_name}/{settings.data}"}

    def _let_read_data(self, settings: Settings, datasets: DatasetBucket) -> None:
        if settings.data is None:
            return
        bucket: s3.IBucket = datasets
        folder = settings.data
        if settings.data.startswith("s3://"):
            name, _, folder = settings.data.removeprefix("s3://").partition("/")
            bucket = s3.Bucket.from_bucket_name(self, "Data", name)
        folder = folder.strip("/")
        self.cluster.grant_read(bucket, f"{folder}/*" if folder else "*")

    def _add_outputs(self) -> None:
        group = self.cluster.auto_scaling_group.ref
        CfnOutput(self, "AutoScalingGroupName", value=group, description="The nodes; scale it to 0 to stop paying for them")
        CfnOutput(
            self,
            "MissingNodesCommand",
            value=f"aws autoscaling describe-scaling-activities --auto-scaling-group-name {group}"
            " --query 'Activities[?StatusCode==`Failed`].[StartTime,StatusMessage]' --output text",
            description="Says why nodes have not started: a lack of capacity does not fail the deploy",
        )
        CfnOutput(self, "RunLocation", value=self.cluster.run_location, description="Checkpoints, metrics and result of the run")
        CfnOutput(self, "LogGroupName", value=self.cluster.log_group.log_group_name, description="What each node did")
        CfnOutput(self, "SessionCommand", value=session_command(group), description="Opens a shell on a node")
        for name, port in FORWARDED_PORTS.items():
            CfnOutput(
                self,
                f"{name}Command",
                value=forwarding_command(group, port),
                description=f"Shows {name}, once it runs on a node at port {port}, as http://localhost:{port}",
            )
