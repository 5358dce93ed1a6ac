"""What a node may do, statement by statement."""

from __future__ import annotations

from aws_cdk import Acknowledgment, ArnFormat, Stack, Validations
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3

from constructs import Construct
from trainrun.spec import EcrImage

CLUSTER_TAG = "traincluster:cluster"
"""Tag with the cluster's name on everything that a node is made of. A node's right to scale goes by it."""


def node_role(
    scope: Construct,
    construct_id: str,
    *,
    cluster_name: str,
    permissions_boundary: iam.IManagedPolicy | None = None,
    metrics_namespace: str = "",
) -> iam.Role:
    """The role of a node: it finds its peers, has its group end or replace nodes, and can be reached by Session Manager.

    Args:
        scope: where the role goes.
        construct_id: its id there.
        cluster_name: name of the cluster, which its group carries as a tag.
        permissions_boundary: policy that bounds what the role may be allowed, as some organisations demand of every role.
        metrics_namespace: CloudWatch namespace of the metrics that its CloudWatch agent sends; "" means that it sends none.
    """
    role = iam.Role(
        scope,
        construct_id,
        assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
        description=f"Nodes of {cluster_name}",
        permissions_boundary=permissions_boundary,
        managed_policies=[iam.ManagedPolicy.from_aws_managed_policy_name("AmazonSSMManagedInstanceCore")],
    )
    role.add_to_policy(
        iam.PolicyStatement(
            sid="FindPeers",
            actions=[
                "autoscaling:DescribeAutoScalingGroups",
                "autoscaling:DescribeAutoScalingInstances",
                "ec2:DescribeCapacityReservations",
                "ec2:DescribeInstances",
            ],
            resources=["*"],
        )
    )
    groups = Stack.of(scope).format_arn(
        service="autoscaling",
        resource="autoScalingGroup",
        resource_name="*:autoScalingGroupName/*",
        arn_format=ArnFormat.COLON_RESOURCE_NAME,
    )
    role.add_to_policy(
        iam.PolicyStatement(
            sid="ChangeOwnGroup",
            actions=[
                "autoscaling:CompleteLifecycleAction",
                "autoscaling:RecordLifecycleActionHeartbeat",
                "autoscaling:SetDesiredCapacity",
                "autoscaling:SetInstanceHealth",
                "autoscaling:UpdateAutoScalingGroup",
            ],
            # By tag: with the group's name here, the group and the role that it needs would depend on each other.
            resources=[groups],
            conditions={"StringEquals": {f"aws:ResourceTag/{CLUSTER_TAG}": cluster_name}},
        )
    )
    if metrics_namespace:
        _let_send_metrics(role, metrics_namespace)
    _acknowledge_findings(role, groups=_as_cdk_nag_writes(role, groups))
    return role


def _let_send_metrics(role: iam.Role, namespace: str) -> None:
    """What the CloudWatch agent needs: metrics of one namespace, and the node's tags, where it finds the name of its group."""
    role.add_to_policy(
        iam.PolicyStatement(
            sid="SendMetrics",
            actions=["cloudwatch:PutMetricData"],
            resources=["*"],
            conditions={"StringEquals": {"cloudwatch:namespace": namespace}},
        )
    )
    role.add_to_policy(iam.PolicyStatement(sid="ReadTags", actions=["ec2:DescribeTags"], resources=["*"]))


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


def grant_pull(role: iam.Role, image: EcrImage) -> None:
    """Let a node pull the images of one repository of ECR, which may be another account's, if that lets it."""
    arn = Stack.of(role).format_arn(
        service="ecr", account=image.account, region=image.region, resource="repository", resource_name=image.repository
    )
    _grant(role, ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"], arn)
    _grant(role, ["ecr:GetAuthorizationToken"], "*")  # knows no resources


def admit_auto_scaling(scope: Construct, key: kms.IKey) -> bool:
    """Let Auto Scaling launch nodes whose volumes are encrypted by a key, as far as the key's policy is this app's to change.

    Auto Scaling uses the key as its service-linked role, which has no right of its own to any customer's key. The statements
    name the role in a condition rather than as the principal: KMS refuses a policy with a principal that does not exist, and
    an account has the role only once it has had a group.

    Source: docs.aws.amazon.com/autoscaling/ec2/userguide/key-policy-requirements-EBS-encryption.html.

    Returns:
        Whether the statements are in the key's policy now.
    """
    stack = Stack.of(scope)
    service = "autoscaling.amazonaws.com"
    role = stack.format_arn(
        service="iam", region="", resource="role", resource_name=f"aws-service-role/{service}/AWSServiceRoleForAutoScaling"
    )
    auto_scaling = {"ArnEquals": {"aws:PrincipalArn": role}, "StringEquals": {"kms:CallerAccount": stack.account}}
    use = iam.PolicyStatement(
        principals=[iam.AnyPrincipal()],
        actions=["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"],
        resources=["*"],
        conditions=auto_scaling,
    )
    pass_on = iam.PolicyStatement(
        principals=[iam.AnyPrincipal()],
        actions=["kms:CreateGrant"],
        resources=["*"],
        conditions={**auto_scaling, "Bool": {"kms:GrantIsForAWSResource": "true"}},
    )
    return all(key.add_to_resource_policy(one, True).statement_added for one in (use, pass_on))


def _grant(grantee: iam.IGrantable, actions: list[str], resource: str) -> iam.Grant:
    return iam.Grant.add_to_principal(grantee=grantee, actions=actions, resource_arns=[resource])


def _as_cdk_nag_writes(scope: Construct, text: str) -> str:
    """Text with its references as they are in the names of cdk-nag's findings: "<AWS::Region>", or what the app knows."""
    resolved = Stack.of(scope).resolve(text)
    parts = resolved["Fn::Join"][1] if isinstance(resolved, dict) else [resolved]
    return "".join(part if isinstance(part, str) else f"<{part['Ref']}>" for part in parts)


def _acknowledge_findings(role: iam.Role, *, groups: str) -> None:
    """Tell cdk-nag why what it finds here is meant."""
    Validations.of(role).acknowledge(
        Acknowledgment(
            id="AwsSolutions-IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/AmazonSSMManagedInstanceCore]",
            reason="AWS maintains in it what its Session Manager agent needs; it gives access to no data.",
        ),
        Acknowledgment(
            id="AwsSolutions-IAM5[Resource::*]",
            reason="The Describe actions (of peers and of the node's Capacity Block) know no resources: IAM takes '*' alone.",
        ),
        Acknowledgment(
            id=f"AwsSolutions-IAM5[Resource::{groups}]",
            reason="Limited by a condition to groups that carry the cluster's own tag.",
        ),
    )
