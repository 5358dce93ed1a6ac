"""What a node may do, statement by statement."""

from __future__ import annotations

from aws_cdk import Acknowledgment, ArnFormat, Stack, Validations
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3 as s3

from constructs import Construct

CLUSTER_TAG = "traincluster:cluster"
"""Tag with the cluster's name on everything that a node is made of. A node's right to scale goes by it."""


def node_role(scope: Construct, construct_id: str, *, cluster_name: str) -> iam.Role:
    """The role of a node: it finds its peers, ends its own group, and can be reached by Session Manager."""
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
            # By tag: with the group's name here, the group and the role that it needs would depend on each other.
            resources=[
                Stack.of(scope).format_arn(
                    service="autoscaling",
                    resource="autoScalingGroup",
                    resource_name="*:autoScalingGroupName/*",
                    arn_format=ArnFormat.COLON_RESOURCE_NAME,
                )
            ],
            conditions={"StringEquals": {f"aws:ResourceTag/{CLUSTER_TAG}": cluster_name}},
        )
    )
    _acknowledge_findings(role)
    return role


def grant_read(grantee: iam.IGrantable, bucket: s3.IBucket, objects: str) -> iam.Grant:
    """Let a node list a bucket and read the objects that match a pattern such as "corpus/*"; no more, unlike the L2's grant."""
    grant = _grant(grantee, ["s3:ListBucket"], bucket.bucket_arn)
    grant = grant.combine(_grant(grantee, ["s3:GetObject"], bucket.arn_for_objects(objects)))
    return grant.combine(bucket.encryption_key.grant(grantee, "kms:Decrypt")) if bucket.encryption_key else grant


def grant_read_write(grantee: iam.IGrantable, bucket: s3.IBucket, objects: str) -> iam.Grant:
    """Let a node write and delete such objects too. Deleting is for retention; the bucket keeps old versions for a while."""
    actions = ["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    grant = grant_read(grantee, bucket, objects).combine(_grant(grantee, actions, bucket.arn_for_objects(objects)))
    return grant.combine(bucket.encryption_key.grant(grantee, "kms:GenerateDataKey")) if bucket.encryption_key else grant


def _grant(grantee: iam.IGrantable, actions: list[str], resource: str) -> iam.Grant:
    return iam.Grant.add_to_principal(grantee=grantee, actions=actions, resource_arns=[resource])


def _acknowledge_findings(role: iam.Role) -> None:
    """Tell cdk-nag why what it finds here is meant."""
    group_arn = "arn:<AWS::Partition>:autoscaling:<AWS::Region>:<AWS::AccountId>:autoScalingGroup:*:autoScalingGroupName/*"
    Validations.of(role).acknowledge(
        Acknowledgment(
            id="AwsSolutions-IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/AmazonSSMManagedInstanceCore]",
            reason="AWS maintains in it what its Session Manager agent needs; it gives access to no data.",
        ),
        Acknowledgment(
            id="AwsSolutions-IAM5[Resource::*]",
            reason="The Describe actions that find a node's peers know no resources: IAM takes '*' alone for them.",
        ),
        Acknowledgment(
            id=f"AwsSolutions-IAM5[Resource::{group_arn}]",
            reason="Limited by a condition to groups that carry the cluster's own tag.",
        ),
    )
