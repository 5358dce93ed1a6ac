"""Who a node is: its role, its bounds, the keys of its volumes, and the partition that it lives in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk.assertions import Template
from cfnlint.api import ManualArgs, lint

from traincluster import Capacity, CheckpointBucket, DataVolume, TrainingCluster, TrainingJob, TrainingNetwork

FOREIGN_KEY = "arn:aws:kms:us-east-1:123456789012:key/01234567-0123-0123-0123-0123456789ab"


def make(outdir: Path, *, region: str | None = None, **arguments: Any) -> tuple[cdk.Stack, TrainingCluster]:
    """A cluster in a stack of a region; arguments that are functions are called with the stack."""
    stack = cdk.Stack(cdk.App(outdir=str(outdir)), "Stack", env=cdk.Environment(region=region))
    given = {name: value(stack) if callable(value) else value for name, value in arguments.items()}
    cluster = TrainingCluster(
        stack,
        "Cluster",
        network=TrainingNetwork(stack, "Network", isolated=True),
        checkpoints=CheckpointBucket(stack, "Checkpoints"),
        job=TrainingJob(run="r", configuration={"steps": 1}),
        **{"instance_type": "c7i.2xlarge", "nodes": 2, **given},
    )
    return stack, cluster


def resources(stack: cdk.Stack, kind: str) -> list[dict[str, Any]]:
    template = Template.from_stack(stack).to_json()
    return [one["Properties"] for one in template["Resources"].values() if one["Type"] == kind]


def warnings(stack: cdk.Stack) -> str:
    return "\n".join(str(e.data) for one in stack.node.find_all() for e in one.node.metadata if e.type == "aws:cdk:warning")


def test_a_permissions_boundary_bounds_the_role(tmp_path):
    def boundary(stack: cdk.Stack) -> iam.IManagedPolicy:
        return iam.ManagedPolicy.from_managed_policy_name(stack, "Boundary", "team-boundary")

    stack, _ = make(tmp_path / "with", permissions_boundary=boundary)
    (role,) = resources(stack, "AWS::IAM::Role")
    assert json.dumps(role["PermissionsBoundary"]).endswith(':policy/team-boundary"]]}')
    stack, _ = make(tmp_path / "without")
    assert "PermissionsBoundary" not in resources(stack, "AWS::IAM::Role")[0]


def test_a_key_of_the_app_admits_auto_scaling_and_no_one_else(tmp_path):
    stack, _ = make(tmp_path, volume_key=lambda stack: kms.Key(stack, "Key"))
    (key,) = resources(stack, "AWS::KMS::Key")
    use, pass_on = key["KeyPolicy"]["Statement"][1:]
    assert set(use["Action"]) == {"kms:Decrypt", "kms:DescribeKey", "kms:Encrypt", "kms:GenerateDataKey*", "kms:ReEncrypt*"}
    assert pass_on["Action"] == "kms:CreateGrant"
    assert pass_on["Condition"]["Bool"] == {"kms:GrantIsForAWSResource": "true"}
    for statement in (use, pass_on):
        role = json.dumps(statement["Condition"]["ArnEquals"]["aws:PrincipalArn"])
        assert "role/aws-service-role/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling" in role
        assert statement["Condition"]["StringEquals"] == {"kms:CallerAccount": {"Ref": "AWS::AccountId"}}
    (template,) = resources(stack, "AWS::EC2::LaunchTemplate")
    assert "KmsKeyId" in template["LaunchTemplateData"]["BlockDeviceMappings"][0]["Ebs"]
    assert "AWSServiceRoleForAutoScaling" not in warnings(stack)


def test_the_key_of_a_data_volume_admits_it_too_and_once(tmp_path):
    def volumes(stack: cdk.Stack) -> list[DataVolume]:
        key = kms.Key(stack, "Key")
        return [DataVolume(size_gib=100, path=path, encryption_key=key) for path in ("/one", "/other")]

    stack, _ = make(tmp_path, volumes=volumes)
    (key,) = resources(stack, "AWS::KMS::Key")
    assert json.dumps(key).count("AWSServiceRoleForAutoScaling") == 2  # one statement to use it, one to pass it on


def test_a_key_that_is_made_elsewhere_is_warned_of(tmp_path):
    stack, _ = make(tmp_path, volume_key=lambda stack: kms.Key.from_key_arn(stack, "Key", FOREIGN_KEY))
    assert "unless it lets the role AWSServiceRoleForAutoScaling use the key" in warnings(stack)


PARTITIONS = [("us-gov-west-1", "aws-us-gov"), ("cn-north-1", "aws-cn"), ("eu-west-1", "aws")]


@pytest.mark.parametrize(("region", "partition"), PARTITIONS)
def test_every_partition_has_its_own_arns(region, partition, tmp_path):
    stack, _ = make(tmp_path, region=region)
    text = json.dumps(Template.from_stack(stack).to_json())
    if partition != "aws":
        assert "arn:aws:" not in text
    assert text.count(f"arn:{partition}:") + text.count('{"Ref": "AWS::Partition"}') > 3
    endpoints = [one["ServiceName"] for one in resources(stack, "AWS::EC2::VPCEndpoint")]
    assert endpoints and (region != "cn-north-1" or any(str(name).startswith("cn.com.amazonaws.") for name in endpoints))


@pytest.mark.parametrize("region", ["us-gov-west-1", "cn-north-1"])
def test_every_partition_passes_cfn_lint(region, tmp_path):
    stack, _ = make(tmp_path, region=region, instance_type="c5.2xlarge")
    findings = lint(json.dumps(Template.from_stack(stack).to_json()), config=ManualArgs(regions=[region]))
    assert [f"{finding.rule.id} {finding.message}" for finding in findings] == []


def test_a_resource_group_of_another_partition_is_refused(tmp_path):
    group = "arn:aws:resource-groups:us-east-1:123456789012:group/blocks"
    stack, _ = make(tmp_path, region="us-gov-west-1", instance_type="p5.48xlarge", capacity=Capacity.block(group))
    with pytest.raises(RuntimeError, match=r"of the partition 'aws', but the stack is deployed to us-gov-west-1"):
        Template.from_stack(stack)
