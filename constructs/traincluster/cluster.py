"""TrainingCluster: nodes that boot, find each other and train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jsii
from aws_cdk import RemovalPolicy, Stack
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_sns as sns

from constructs import Construct
from traincluster.access import SshAccess
from traincluster.arguments import Argument, check_arguments
from traincluster.capacity import Capacity, schedule_drain
from traincluster.efa import (
    EfaLayout,
    NetworkInterface,
    allow_traffic_among_members,
    network_interfaces,
    render_interfaces,
    use_efa,
)
from traincluster.image import NodeImage, default_image, resolve, root_volume_size
from traincluster.instances import InstanceType
from traincluster.instances import instance_type as look_up
from traincluster.job import TrainingJob
from traincluster.job_facts import binding_facts, job_facts, launcher_facts, software_facts, usable_nodes
from traincluster.mounts import FileSystem, attach_all, storage_findings, storage_spec
from traincluster.network import TrainingNetwork
from traincluster.network_checks import check_network
from traincluster.nodes import TERMINATION_HOOK, NodeTemplate, auto_scaling_group, launch_template, lifecycle_hook
from traincluster.notifications import let_publish
from traincluster.payload import pack
from traincluster.permissions import admit_auto_scaling, grant_pull, grant_read, grant_read_write, node_role
from traincluster.placement import place
from traincluster.readiness import Readiness, ReadinessGate
from traincluster.rules.ending import EndingFacts
from traincluster.rules.engine import check
from traincluster.rules.identity import IdentityFacts
from traincluster.rules.report import known, report
from traincluster.user_data import place_user_data
from traincluster.volumes import DataVolume, block_device_mappings
from trainrun.spec import Accelerator, ClusterSpec, MonitoringSpec, RunSpec, ecr_image, machine_metrics


@jsii.implements(ec2.IConnectable, iam.IGrantable)
class TrainingCluster(Construct):
    """A group of equal nodes that runs one training job.

    The nodes get every EFA interface that their type has, a security group that lets them talk to each other, and one
    document that says what to run. The cluster is all that a run needs and nothing that should outlive it: checkpoints go
    to a bucket that is made elsewhere.

    Example:
        >>> TrainingCluster(                                                          # doctest: +SKIP
        ...     stack, "Cluster", network=network, instance_type="p5.48xlarge", nodes=4,
        ...     capacity=Capacity.block("cr-0123456789abcdef0"), checkpoints=checkpoints,
        ...     job=TrainingJob(run="llama", source="my_project", entry_point="train.py"),
        ... )
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        network: TrainingNetwork,
        instance_type: str,
        nodes: int,
        job: TrainingJob,
        checkpoints: s3.IBucket,
        min_nodes: int | None = None,
        start_nodes: bool = True,
        capacity: Capacity | None = None,
        efa: bool | None = None,
        efa_layout: EfaLayout | None = None,
        placement_group: bool | ec2.IPlacementGroup | None = None,
        image: NodeImage | None = None,
        root_volume_gib: int | None = None,
        volumes: Sequence[DataVolume] = (),
        volume_key: kms.IKey | None = None,
        permissions_boundary: iam.IManagedPolicy | None = None,
        file_systems: Sequence[FileSystem] = (),
        instance_store: str | None = None,
        ssh: SshAccess | None = None,
        processes_per_node: int | None = None,
        termination_hook: bool | None = None,
        bandwidth_check: bool = False,
        log_retention: logs.RetentionDays = logs.RetentionDays.ONE_MONTH,
        metrics_namespace: str = machine_metrics.NAMESPACE,
        readiness: Readiness | None = None,
        notify: sns.ITopic | None = None,
    ) -> None:
        """Make the cluster.

        Args:
            scope: where the construct goes.
            construct_id: its id there.
            network: where the nodes are.
            instance_type: name of an EC2 instance type, out of `traincluster.instances`.
            nodes: number of nodes, 1 or more.
            job: what they run.
            checkpoints: bucket for the run's checkpoints, metrics and results.
            min_nodes: fewest nodes on which training goes on when others are lost; None means all of them.
            start_nodes: False deploys all but the nodes. The Auto Scaling group then begins with none, and a later deploy
                leaves its size alone; scale it to ``nodes`` when they shall run.
            capacity: how the nodes are bought; None means on demand.
            efa: whether nodes have EFA; None means if their type does.
            efa_layout: how EFA interfaces are laid out; None means by AWS's current rule.
            placement_group: True makes a cluster placement group, False none; a group that exists is used. None makes one
                where it helps: when the type can be in one and the capacity is not reserved.
            image: the nodes' image; None means AWS's deep-learning image for the type.
            root_volume_gib: size of the root volume in GiB; None means 120, and 512 on Neuron types.
            volumes: EBS volumes of each node besides the root volume.
            volume_key: key of the root volume; None means the account's key for EBS.
            permissions_boundary: policy that bounds the role of the nodes; None means no boundary.
            file_systems: shared file systems that every node mounts before it trains.
            instance_store: where the type's own disks are mounted, all as one; None leaves them alone.
            ssh: SSH besides Session Manager, which needs no open port; None means no SSH.
            processes_per_node: ranks per node; None means one per GPU or Neuron core, or one on a CPU node.
            termination_hook: whether a node that the Auto Scaling group ends (a deploy, a scale-in, a replacement) may save
                first; None means unless ``capacity`` is spot.
            bandwidth_check: whether a node measures the all-reduce over its GPUs before it trains, which takes some seconds, and
                is replaced if that is too slow (docs/nodes.md).
            log_retention: how long the cluster's logs are kept.
            metrics_namespace: CloudWatch namespace of the machines' metrics (`trainrun.spec.machine_metrics` has their names),
                which the image's CloudWatch agent sends; "" leaves that agent alone.
            readiness: whether a deploy waits until nodes have passed their checks; None means that it does not.
            notify: topic that hears when the run ends, however it does, such as a `NotificationTopic`; None means none.

        Raises:
            ValueError: something that could not run, with what to change.
        """
        super().__init__(scope, construct_id)
        check_arguments(
            Argument("network", network, TrainingNetwork, "TrainingNetwork(stack, 'Network', vpc=...) takes a VPC that exists."),
            Argument("instance_type", instance_type, str, "Give the type's name, such as 'p5.48xlarge'."),
            Argument("nodes", nodes, int, "It is a number of instances."),
            Argument("min_nodes", min_nodes, int, "It is a number of instances.", optional=True),
            Argument("metrics_namespace", metrics_namespace, str, "It is a name, such as 'Traincluster'; '' sends no metrics."),
            Argument("processes_per_node", processes_per_node, int, "It is a number of ranks.", optional=True),
            Argument("job", job, TrainingJob, "TrainingJob(run='my-run') trains the bundled GPT."),
            Argument(
                "checkpoints", checkpoints, s3.BucketBase, "Make a CheckpointBucket, or adopt one: s3.Bucket.from_bucket_name."
            ),
            Argument("capacity", capacity, Capacity, "Capacity.parse('spot') reads the text of cluster.yaml.", optional=True),
            Argument("readiness", readiness, Readiness, "Readiness.signal(timeout_minutes=30) waits for signals.", optional=True),
            Argument(
                "notify", notify, sns.TopicBase, "NotificationTopic(stack, 'Topic', email='someone@example.com').", optional=True
            ),
            Argument("image", image, NodeImage, "NodeImage(ami='ami-...') is an image of your own.", optional=True),
        )
        self.instance_type = look_up(instance_type)
        self.capacity = capacity or Capacity.on_demand()
        _check_counts(nodes=nodes, min_nodes=min_nodes, processes_per_node=processes_per_node)
        self.readiness = readiness or Readiness.none()
        if self.readiness.way != "none" and not start_nodes:
            raise ValueError(
                f"readiness is {self.readiness.way!r}, but start_nodes is false: there is no node to wait for. Drop one."
            )
        self.image = image or default_image(self.instance_type)
        interfaces = network_interfaces(self.instance_type, efa=use_efa(self.instance_type, efa), layout=efa_layout)

        self.security_group = ec2.SecurityGroup(
            self, "SecurityGroup", vpc=network.vpc, description=f"Nodes of {self.node.path}", allow_all_outbound=True
        )
        rules = allow_traffic_among_members(self, self.security_group)
        if ssh is not None:
            ssh.allow(self.security_group)
        mountable = attach_all(self, file_systems, self.security_group)
        monitoring = MonitoringSpec(publish_seconds=job.publish_seconds, namespace=metrics_namespace)
        for service in _services_used(checkpoints, file_systems, metrics_namespace, job, self.readiness, notify):
            network.add_endpoint(service)
        self.log_group = logs.LogGroup(self, "Logs", retention=log_retention, removal_policy=RemovalPolicy.DESTROY)
        self.role = node_role(
            self,
            "NodeRole",
            cluster_name=self.node.path,
            permissions_boundary=permissions_boundary,
            metrics_namespace=metrics_namespace,
        )
        self.log_group.grant_write(self.role)
        grant_read_write(self.role, checkpoints, f"{job.run}/*")
        if job.requirements or job.conda:
            grant_read_write(self.role, checkpoints, "software/*")
        if image_in_ecr := ecr_image(job.container):
            grant_pull(self.role, image_in_ecr)
        if notify is not None:
            let_publish(self.role, notify)

        holds = self.capacity.holds_terminations(termination_hook)
        payload = pack(job.source_folder)
        cluster = _cluster_spec(
            self.node.path,
            self.instance_type,
            interfaces,
            nodes=nodes,
            min_nodes=min_nodes,
            processes=processes_per_node,
            hook=TERMINATION_HOOK if holds else "",
            ends=self.capacity.ends_text,
            bandwidth=bandwidth_check,
        )
        self.run_spec = RunSpec(
            run=job.run,
            region=Stack.of(self).region,
            cluster=replace(cluster, nodes_usable=usable_nodes(job, cluster)),
            job=job.spec(python=self.image.python),
            storage=storage_spec(
                location=f"s3://{checkpoints.bucket_name}",
                file_systems=file_systems,
                volumes=volumes,
                instance_store=instance_store,
            ),
            timeouts=job.timeouts,
            monitoring=replace(
                monitoring, log_group=self.log_group.log_group_name, topic="" if notify is None else notify.topic_arn
            ),
            shutdown=job.shutdown,
            payload_sha256=payload.sha256,
        )
        gate = ReadinessGate(self, self.readiness)
        self.run_spec = gate.spec(self.run_spec)
        placement = place(self, wanted=placement_group, capacity=self.capacity, instance_type=self.instance_type)
        resolved = resolve(self, self.image)
        root_gib = root_volume_size(self.instance_type, root_volume_gib)
        node = NodeTemplate(
            cluster_name=self.node.path,
            run=job.run,
            instance_type=instance_type,
            image_id=resolved.image_id,
            block_devices=block_device_mappings(
                root_device=self.image.root_device_name,
                root_volume_gib=root_gib,
                volumes=volumes,
                encryption_key=volume_key,
            ),
            key_pair=ssh.key_pair if ssh else None,
            user_data=place_user_data(self, self.run_spec, payload, reader=self.role),
            interfaces=render_interfaces(interfaces, security_group_ids=[self.security_group.security_group_id]),
            capacity=self.capacity,
            instance_profile_arn=iam.InstanceProfile(self, "InstanceProfile", role=self.role).instance_profile_arn,
            placement_group_name=placement.group_name,
        )
        self.launch_template = launch_template(self, "LaunchTemplate", node)
        self.auto_scaling_group = auto_scaling_group(
            self,
            "Nodes",
            template=self.launch_template,
            node=node,
            subnet=network.subnet,
            nodes=nodes,
            min_nodes=cluster.nodes_min,
            start=start_nodes,
            readiness=self.readiness,
        )
        gate.close(self.auto_scaling_group, role=self.role, count=cluster.nodes_min)
        if holds:
            lifecycle_hook(self, "SaveAndLeave", group=self.auto_scaling_group, stop_grace=job.timeouts.stop_grace)
        schedule_drain(self, group=self.auto_scaling_group, capacity=self.capacity, own=self.instance_type)
        efa_interfaces = self.run_spec.cluster.efa_interfaces
        for facts in (
            self.capacity.facts(self.instance_type, nodes=nodes, placement=placement.kind, group=placement.group_name),
            self.image.facts(self.instance_type, pinned=resolved.pinned, efa=efa_interfaces > 0, root_volume_gib=root_gib),
            *job_facts(job, self.run_spec.cluster, memory_gib=self.instance_type.memory_gib),
            launcher_facts(job, self.image),
            binding_facts(job, self.run_spec.cluster),
            EndingFacts(
                kept_on=tuple(name for name in ("on_success", "on_failure") if getattr(job.shutdown, name) == "keep"),
                keep_minutes=job.shutdown.keep_minutes,
                instance_type=instance_type,
                has_accelerators=self.instance_type.accelerator is not None,
            ),
            software_facts(job, self.image, region=known(Stack.of(self).region), isolated=network.is_isolated),
            _identity_facts(self, volume_key=volume_key, volumes=volumes, capacity=self.capacity, boundary=permissions_boundary),
        ):
            report(self, check(facts))
        report(
            self,
            storage_findings(
                instance_type=self.instance_type,
                efa=efa_interfaces > 0,
                file_systems=file_systems,
                volumes=volumes,
                instance_store=instance_store,
                root_volume_gib=root_gib,
            ),
        )
        # A node that starts before these exist could reach neither its peers, nor its file systems, nor AWS.
        self.auto_scaling_group.node.add_dependency(self.role, *rules, *mountable, *network.ready)
        report(
            self,
            check_network(
                self,
                network,
                instance_type=self.instance_type,
                nodes=nodes,
                interfaces=interfaces,
                capacity=self.capacity,
                file_systems=len(file_systems),
                volumes=volumes,
                ssh=ssh,
            ),
        )

    @property
    def connections(self) -> ec2.Connections:
        """What the nodes may be connected with: `cluster.connections.allow_to(file_system, ...)`."""
        return ec2.Connections(security_groups=[self.security_group])

    @property
    def grant_principal(self) -> iam.IPrincipal:
        """The nodes, as whom to grant something: `bucket.grant_read(cluster)`."""
        return self.role

    @property
    def run_location(self) -> str:
        """URL of the run's folder: checkpoints, metrics, events and the result."""
        return self.run_spec.run_location

    def grant_read(self, bucket: s3.IBucket, objects: str = "*") -> iam.Grant:
        """Let the nodes read a bucket, or the objects of it that match a pattern such as "web/*"."""
        return grant_read(self.role, bucket, objects)

    def grant_read_write(self, bucket: s3.IBucket, objects: str = "*") -> iam.Grant:
        """Let the nodes read, write and delete objects of a bucket, or those that match a pattern."""
        return grant_read_write(self.role, bucket, objects)


def _identity_facts(
    scope: Construct,
    *,
    volume_key: kms.IKey | None,
    volumes: Sequence[DataVolume],
    capacity: Capacity,
    boundary: iam.IManagedPolicy | None,
) -> IdentityFacts:
    """What the rules look at, after each key of a volume has been made to admit Auto Scaling."""
    given = [
        ("The resource group in capacity", known(capacity.reserved)),
        ("permissions_boundary", known(boundary.managed_policy_arn) if boundary else None),
    ]
    keys = [key for key in (volume_key, *(volume.encryption_key for volume in volumes)) if key is not None]
    admitted = [admit_auto_scaling(scope, key) for key in keys]
    return IdentityFacts(
        region=known(Stack.of(scope).region),
        arns=tuple((what, arn) for what, arn in given if arn is not None and arn.startswith("arn:")),
        volume_key_is_foreign=not all(admitted),
    )


def _services_used(
    checkpoints: s3.IBucket,
    file_systems: Sequence[FileSystem],
    metrics_namespace: str,
    job: TrainingJob,
    readiness: Readiness,
    notify: sns.ITopic | None,
) -> list[str]:
    """The AWS services that a node calls only with these settings."""
    used = ["kms"] if checkpoints.encryption_key else []
    used += ["monitoring"] if metrics_namespace else []
    used += ["cloudformation"] if readiness.way == "signal" else []  # a wait condition's URL is S3's, which has its own
    used += ["sns"] if notify is not None else []
    used += ["ecr.api", "ecr.dkr"] if ecr_image(job.container) else []
    return [*used, "fsx"] if any(one.mount.type == "lustre" for one in file_systems) else used


def _check_counts(*, nodes: int, min_nodes: int | None, processes_per_node: int | None) -> None:
    if nodes < 1:
        raise ValueError(f"nodes is {nodes}. Allowed: 1 or more.")
    if min_nodes is not None and not 1 <= min_nodes <= nodes:
        raise ValueError(f"min_nodes is {min_nodes}. Allowed: 1 to nodes ({nodes}).")
    if processes_per_node is not None and processes_per_node < 1:
        raise ValueError(f"processes_per_node is {processes_per_node}. Allowed: 1 or more.")


def _cluster_spec(
    name: str,
    instance_type: InstanceType,
    interfaces: tuple[NetworkInterface, ...],
    *,
    nodes: int,
    min_nodes: int | None,
    processes: int | None,
    hook: str,
    ends: str,
    bandwidth: bool,
) -> ClusterSpec:
    return ClusterSpec(
        name=name,
        instance_type=instance_type.name,
        nodes_min=nodes if min_nodes is None else min_nodes,
        nodes_desired=nodes,
        nodes_max=nodes,
        accelerator=_accelerator(instance_type),
        accelerators_per_node=instance_type.accelerator.count if instance_type.accelerator else 0,
        efa_interfaces=sum(interface.carries_efa for interface in interfaces),
        processes_per_node=processes or instance_type.training_processes,
        termination_hook=hook,
        capacity_ends=ends,
        bandwidth_check=bandwidth,
    )


def _accelerator(instance_type: InstanceType) -> Accelerator:
    accelerator = instance_type.accelerator
    if accelerator is None:
        return "none"
    if accelerator.kind == "other":
        raise ValueError(
            f"{instance_type.name} has {accelerator.name} accelerators, which trainrun cannot drive. "
            "Choose a type with NVIDIA GPUs or Trainium, or a CPU type."
        )
    return accelerator.kind
