"""The nodes of a cluster: their launch template and their Auto Scaling group."""

from __future__ import annotations

from dataclasses import dataclass

from aws_cdk import Acknowledgment, CfnAutoScalingRollingUpdate, CfnUpdatePolicy, Fn, Validations
from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_ec2 as ec2

from constructs import Construct
from traincluster.capacity import Capacity
from traincluster.permissions import CLUSTER_TAG
from traincluster.readiness import Readiness
from trainrun.spec import hook_heartbeat

MOST_REPLACED_AT_ONCE = 100
"""CloudFormation's own limit of MaxBatchSize in a rolling update."""

TERMINATION_HOOK = "save-and-leave"
"""Name of the lifecycle hook in which a node that is to be ended saves first. Names are a group's own."""


@dataclass(frozen=True, kw_only=True)
class NodeTemplate:
    """Everything that makes one node."""

    cluster_name: str
    run: str
    instance_type: str
    image_id: str
    block_devices: list[ec2.CfnLaunchTemplate.BlockDeviceMappingProperty]
    key_pair: str | None
    user_data: str
    interfaces: list[ec2.CfnLaunchTemplate.NetworkInterfaceProperty]
    capacity: Capacity
    instance_profile_arn: str
    placement_group_name: str | None


def launch_template(scope: Construct, construct_id: str, node: NodeTemplate) -> ec2.CfnLaunchTemplate:
    """The launch template. It is L1 because the L2 has neither network interfaces nor capacity reservations."""
    tags = [
        {"key": "Name", "value": node.cluster_name},
        {"key": CLUSTER_TAG, "value": node.cluster_name},
        {"key": "traincluster:run", "value": node.run},
    ]
    placement = None
    if node.placement_group_name is not None:
        placement = ec2.CfnLaunchTemplate.PlacementProperty(group_name=node.placement_group_name)
    data = ec2.CfnLaunchTemplate.LaunchTemplateDataProperty(
        image_id=node.image_id,
        instance_type=node.instance_type,
        iam_instance_profile=ec2.CfnLaunchTemplate.IamInstanceProfileProperty(arn=node.instance_profile_arn),
        network_interfaces=node.interfaces,
        placement=placement,
        instance_market_options=node.capacity.market_options(),
        capacity_reservation_specification=node.capacity.reservation_specification(),
        block_device_mappings=node.block_devices,
        key_name=node.key_pair,
        # Two hops, since a container on the node is one hop further from the metadata service. Tags stay out of it: with
        # them in, EC2 refuses to launch a node that has a tag with a space or a slash in its key.
        metadata_options=ec2.CfnLaunchTemplate.MetadataOptionsProperty(http_tokens="required", http_put_response_hop_limit=2),
        monitoring=ec2.CfnLaunchTemplate.MonitoringProperty(enabled=True),
        tag_specifications=[
            ec2.CfnLaunchTemplate.TagSpecificationProperty(resource_type=kind, tags=tags)
            for kind in ("instance", "volume", "network-interface")
        ],
        user_data=Fn.base64(node.user_data),
    )
    return ec2.CfnLaunchTemplate(scope, construct_id, launch_template_data=data)


def auto_scaling_group(
    scope: Construct,
    construct_id: str,
    *,
    template: ec2.CfnLaunchTemplate,
    node: NodeTemplate,
    subnet: ec2.ISubnet,
    nodes: int,
    min_nodes: int,
    start: bool,
    readiness: Readiness,
) -> autoscaling.CfnAutoScalingGroup:
    """The group that keeps ``nodes`` nodes running in one subnet.

    Its least size is 0, so that the end of a run, or a person, can scale it to nothing with one call, and so that a lack of
    capacity does not fail the stack: CloudFormation waits for the least size only, and the group goes on trying. Without
    ``start`` the group begins at its least size, and no deploy changes its size. When a deploy changes
    the launch template, CloudFormation ends all nodes at once and the group starts new ones, which resume: nodes of an old
    and a new version could not train together. With ``readiness`` by signal it waits for as many of them as training needs.
    """
    version = autoscaling.CfnAutoScalingGroup.LaunchTemplateSpecificationProperty(
        launch_template_id=template.ref, version=template.attr_latest_version_number
    )
    several_types = node.capacity.mixed_instances_policy(version, node.instance_type)
    group = autoscaling.CfnAutoScalingGroup(
        scope,
        construct_id,
        min_size="0",
        max_size=str(nodes),
        desired_capacity=str(nodes) if start else None,
        vpc_zone_identifier=[subnet.subnet_id],
        launch_template=None if several_types else version,
        mixed_instances_policy=several_types,
        capacity_rebalance=node.capacity.rebalancing or None,
        health_check_type="EC2",
        tags=[
            autoscaling.CfnAutoScalingGroup.TagPropertyProperty(
                key=CLUSTER_TAG, value=node.cluster_name, propagate_at_launch=False
            )
        ],
    )
    waits = readiness.way == "signal"
    group.cfn_options.update_policy = CfnUpdatePolicy(
        auto_scaling_rolling_update=CfnAutoScalingRollingUpdate(
            min_instances_in_service=0,
            max_batch_size=min(nodes, MOST_REPLACED_AT_ONCE),
            wait_on_resource_signals=True if waits else None,
            pause_time=readiness.duration if waits else None,
            min_successful_instances_percent=100 * min_nodes // nodes if waits else None,
        )
    )
    group.cfn_options.creation_policy = readiness.creation_policy(count=min_nodes)
    Validations.of(group).acknowledge(
        Acknowledgment(
            id="AwsSolutions-AS3",
            reason="Nodes come and go as the run needs them; what becomes of the run itself is in its events and its result.",
        )
    )
    if several_types:
        Validations.of(group).acknowledge(
            Acknowledgment(
                id="AwsSolutions-EC26",
                reason="The launch template encrypts every volume; the check cannot follow the group to it through the policy.",
            )
        )
    return group


def lifecycle_hook(
    scope: Construct, construct_id: str, *, group: autoscaling.CfnAutoScalingGroup, stop_grace: int
) -> autoscaling.CfnLifecycleHook:
    """Have the group wait for a node that it ends, until the node says that it has saved.

    A node that says nothing, such as one that is dead, is ended when the heartbeat is over. The hook is a resource of its own,
    which goes before its group when the stack is deleted: CloudFormation then waits for no node.

    Args:
        scope: where the hook goes.
        construct_id: its id there.
        group: the nodes' group.
        stop_grace: seconds that the ranks have for the last checkpoint.
    """
    return autoscaling.CfnLifecycleHook(
        scope,
        construct_id,
        auto_scaling_group_name=group.ref,
        lifecycle_hook_name=TERMINATION_HOOK,
        lifecycle_transition="autoscaling:EC2_INSTANCE_TERMINATING",
        heartbeat_timeout=hook_heartbeat(stop_grace),
        default_result="CONTINUE",
    )
