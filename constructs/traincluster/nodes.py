"""The nodes of a cluster: launch template, Auto Scaling group, and what a node may do."""

from __future__ import annotations

from dataclasses import dataclass

from aws_cdk import CfnAutoScalingRollingUpdate, CfnUpdatePolicy, Fn, Stack
from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from constructs import Construct

from traincluster.capacity import Capacity

CLUSTER_TAG = "traincluster:cluster"
"""Tag with the cluster's name on everything that a node is made of. A node's right to scale goes by it."""


@dataclass(frozen=True, kw_only=True)
class NodeTemplate:
    """Everything that makes one node."""

    cluster_name: str
    run: str
    instance_type: str
    image_id: str
    root_device: str
    root_volume_gib: int
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
    root_volume = ec2.CfnLaunchTemplate.EbsProperty(
        volume_size=node.root_volume_gib, volume_type="gp3", encrypted=True, delete_on_termination=True
    )
    data = ec2.CfnLaunchTemplate.LaunchTemplateDataProperty(
        image_id=node.image_id,
        instance_type=node.instance_type,
        iam_instance_profile=ec2.CfnLaunchTemplate.IamInstanceProfileProperty(arn=node.instance_profile_arn),
        network_interfaces=node.interfaces,
        placement=placement,
        instance_market_options=node.capacity.market_options(),
        capacity_reservation_specification=node.capacity.reservation_specification(),
        block_device_mappings=[
            ec2.CfnLaunchTemplate.BlockDeviceMappingProperty(device_name=node.root_device, ebs=root_volume)
        ],
        # Two hops, since a container on the node is one hop further from the metadata service.
        metadata_options=ec2.CfnLaunchTemplate.MetadataOptionsProperty(
            http_tokens="required", http_put_response_hop_limit=2, instance_metadata_tags="enabled"
        ),
        monitoring=ec2.CfnLaunchTemplate.MonitoringProperty(enabled=True),
        tag_specifications=[
            ec2.CfnLaunchTemplate.TagSpecificationProperty(resource_type=kind, tags=tags)
            for kind in ("instance", "volume", "network-interface")
        ],
        user_data=Fn.base64(node.user_data),
    )
    return ec2.CfnLaunchTemplate(scope, construct_id, launch_template_data=data)


def auto_scaling_group(
    scope: Construct, construct_id: str, *, template: ec2.CfnLaunchTemplate, subnet: ec2.ISubnet, nodes: int, cluster_name: str
) -> autoscaling.CfnAutoScalingGroup:
    """The group that keeps ``nodes`` nodes running in one subnet.

    Its least size is 0, so that the end of a run, or a person, can scale it to nothing with one call. When a deploy changes
    the launch template, CloudFormation ends all nodes at once and the group starts new ones, which resume: nodes of an old
    and a new version could not train together.
    """
    group = autoscaling.CfnAutoScalingGroup(
        scope,
        construct_id,
        min_size="0",
        max_size=str(nodes),
        desired_capacity=str(nodes),
        vpc_zone_identifier=[subnet.subnet_id],
        launch_template=autoscaling.CfnAutoScalingGroup.LaunchTemplateSpecificationProperty(
            launch_template_id=template.ref, version=template.attr_latest_version_number
        ),
        health_check_type="EC2",
        tags=[
            autoscaling.CfnAutoScalingGroup.TagPropertyProperty(
                key=CLUSTER_TAG, value=cluster_name, propagate_at_launch=False
            )
        ],
    )
    group.cfn_options.update_policy = CfnUpdatePolicy(
        auto_scaling_rolling_update=CfnAutoScalingRollingUpdate(min_instances_in_service=0, max_batch_size=nodes)
    )
    return group


def node_role(scope: Construct, construct_id: str, *, cluster_name: str) -> iam.Role:
    """The role of a node: find its peers, end its own group, be reached by Session Manager."""
    stack = Stack.of(scope)
    role = iam.Role(
        scope,
        construct_id,
        assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
        description=f"Nodes of {cluster_name}",
        managed_policies=[iam.ManagedPolicy.from_aws_managed_policy_name("AmazonSSMManagedInstanceCore")],
    )
    role.add_to_policy(
        iam.PolicyStatement(
            sid="FindPeers",
            # These actions know no resources: AWS takes "*" alone for them.
            actions=[
                "autoscaling:DescribeAutoScalingGroups",
                "autoscaling:DescribeAutoScalingInstances",
                "ec2:DescribeInstances",
            ],
            resources=["*"],
        )
    )
    role.add_to_policy(
        iam.PolicyStatement(
            sid="ScaleOwnGroup",
            actions=["autoscaling:SetDesiredCapacity", "autoscaling:UpdateAutoScalingGroup"],
            # By tag, since the group's own name would make the group and the role that it needs depend on each other.
            resources=[stack.format_arn(service="autoscaling", resource="autoScalingGroup", resource_name="*")],
            conditions={"StringEquals": {f"aws:ResourceTag/{CLUSTER_TAG}": cluster_name}},
        )
    )
    return role
