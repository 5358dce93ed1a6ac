"""TrainingClusterStack: all that a run needs and nothing that should outlive it."""

from __future__ import annotations

from typing import Any

from aws_cdk import Annotations, CfnOutput, Stack
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_s3 as s3

from constructs import Construct
from stacks.settings import Settings
from traincluster import CheckpointBucket, DatasetBucket, TrainingCluster, TrainingJob, TrainingNetwork


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
        super().__init__(scope, construct_id, description=f"Traincluster: the nodes of the run {settings.run}")
        self.network = TrainingNetwork(self, "Network", availability_zone=settings.availability_zone, isolated=settings.isolated)
        self.cluster = TrainingCluster(
            self,
            "Cluster",
            network=self.network,
            instance_type=settings.instance_type,
            nodes=settings.nodes,
            min_nodes=settings.min_nodes,
            capacity=settings.parsed_capacity,
            efa=settings.efa,
            placement_group=self._placement_group(settings.placement_group),
            image=settings.image,
            root_volume_gib=settings.root_volume_gib,
            job=TrainingJob(
                run=settings.run,
                source=settings.source,
                entry_point=settings.entry_point,
                arguments=settings.arguments,
                environment=settings.environment,
                configuration=self._configuration(settings, datasets),
                timeouts=settings.timeouts,
                shutdown=settings.shutdown,
                publish_seconds=settings.publish_seconds,
            ),
            checkpoints=checkpoints,
        )
        self._let_read_data(settings, datasets)
        self._warn_of_unset_zone(settings)
        self._add_outputs()

    def _placement_group(self, wanted: bool | str | None) -> bool | ec2.IPlacementGroup | None:
        if isinstance(wanted, str):
            return ec2.PlacementGroup.from_placement_group_name(self, "PlacementGroup", wanted)
        return wanted

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

    def _warn_of_unset_zone(self, settings: Settings) -> None:
        if settings.parsed_capacity.is_placed_by_ec2 and settings.availability_zone is None:
            Annotations.of(self).add_warning_v2(
                "traincluster:zoneOfReservation",
                "The capacity is reserved in one Availability Zone, but availability_zone is not set: the nodes are put into the "
                "first zone of the region and start only if that is the reservation's.",
            )

    def _add_outputs(self) -> None:
        group = self.cluster.auto_scaling_group.ref
        CfnOutput(self, "AutoScalingGroupName", value=group, description="The nodes; scale it to 0 to stop paying for them")
        CfnOutput(self, "RunLocation", value=self.cluster.run_location, description="Checkpoints, metrics and result of the run")
        CfnOutput(
            self, "LogGroupName", value=self.cluster.log_group.log_group_name, description="What each node did, step by step"
        )
        CfnOutput(
            self,
            "SessionCommand",
            value=(
                "aws ssm start-session --target $(aws autoscaling describe-auto-scaling-groups "
                f"--auto-scaling-group-names {group} --query 'AutoScalingGroups[0].Instances[0].InstanceId' --output text)"
            ),
            description="Opens a shell on a node",
        )
