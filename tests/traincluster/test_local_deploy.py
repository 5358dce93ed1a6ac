"""Every kind of capacity, image and identity deploys on the emulated AWS and leaves nothing there."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import boto3
import pytest
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk.assertions import Template
from botocore.config import Config

from traincluster import Capacity, CheckpointBucket, NodeImage, TrainingCluster, TrainingJob, TrainingNetwork
from traincluster.image import PINS_CONTEXT

ROOT = Path(__file__).parents[2]
RESERVATION = "cr-0123456789abcdef0"
PARAMETER = NodeImage.for_type("c7i.2xlarge").ami


@pytest.fixture
def client(emulated_aws: str) -> Any:
    """Makes clients that fail rather than wait."""
    config = Config(connect_timeout=5, read_timeout=120, retries={"total_max_attempts": 1})
    return lambda service: boto3.client(service, region_name="us-east-1", endpoint_url=emulated_aws, config=config)


def template_of(outdir: Path, context: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    """The template of a cluster; arguments that are functions are called with its stack."""
    app = cdk.App(outdir=str(outdir), context=context)
    synthesizer = cdk.DefaultStackSynthesizer(generate_bootstrap_version_rule=False)
    stack = cdk.Stack(app, "Stack", synthesizer=synthesizer)
    given = {name: value(stack) if callable(value) else value for name, value in arguments.items()}
    TrainingCluster(
        stack,
        "Cluster",
        network=TrainingNetwork(stack, "Network", isolated=True),
        checkpoints=CheckpointBucket(stack, "Checkpoints"),
        **{"instance_type": "c7i.2xlarge", "nodes": 2, "job": TrainingJob(run="r", configuration={"steps": 1}), **given},
    )
    template: dict[str, Any] = Template.from_stack(stack).to_json()
    for resource in template["Resources"].values():
        resource.pop("DeletionPolicy", None)  # what would be retained shall go too, so that nothing may be left
    return template


SAMPLES: dict[str, dict[str, Any]] = {
    "spot of several types": {"capacity": Capacity.spot(instance_types=["c6i.2xlarge"], rebalancing=True)},
    "reservation": {"instance_type": "p4d.24xlarge", "capacity": Capacity.reservation(RESERVATION)},
    "block with an end": {
        "instance_type": "p5.48xlarge",
        "capacity": Capacity.parse(f"block:{RESERVATION} until 2099-12-24T11:30Z"),
    },
    "neuron": {"instance_type": "trn1.32xlarge", "capacity": Capacity.spot()},
    "key, boundary and Amazon Linux": {
        "image": NodeImage.for_type("c7i.2xlarge", os="amazon-linux-2023"),
        "volume_key": lambda stack: kms.Key(stack, "Key", removal_policy=cdk.RemovalPolicy.DESTROY),
        "permissions_boundary": lambda stack: iam.ManagedPolicy.from_managed_policy_name(stack, "Boundary", "team-boundary"),
    },
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_deploys_starts_its_nodes_and_goes(name, client, emulated_aws, tmp_path):
    before = inventory(emulated_aws)
    client("cloudformation").create_stack(
        StackName="sample", Capabilities=["CAPABILITY_IAM"], **body(template_of(tmp_path, **SAMPLES[name]))
    )
    assert status(client) == "CREATE_COMPLETE"
    (group,) = client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    assert len(group["Instances"]) == 2
    remove(client)
    assert inventory(emulated_aws) == before


def test_zero_nodes_at_first_stay_zero_when_something_else_is_deployed(client, tmp_path):
    formation = client("cloudformation")
    first = template_of(tmp_path / "first", start_nodes=False)
    formation.create_stack(StackName="sample", Capabilities=["CAPABILITY_IAM"], **body(first))
    assert status(client) == "CREATE_COMPLETE"
    (group,) = client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    assert (group["DesiredCapacity"], group["Instances"]) == (0, [])
    client("autoscaling").set_desired_capacity(AutoScalingGroupName=group["AutoScalingGroupName"], DesiredCapacity=2)
    second = template_of(tmp_path / "second", start_nodes=False, job=TrainingJob(run="r", configuration={"steps": 2}))
    formation.update_stack(StackName="sample", Capabilities=["CAPABILITY_IAM"], **body(second))
    assert status(client) == "UPDATE_COMPLETE"
    (group,) = client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    there = [one for one in group["Instances"] if one["LifecycleState"] == "InService"]  # those before wait in their hook
    assert group["DesiredCapacity"] == len(there) == 2
    remove(client)


def test_a_lack_of_capacity_neither_fails_the_stack_nor_goes_untold(client, tmp_path):
    """Played by an image that does not exist: what EC2 refuses at launch, for whatever reason, takes the same way."""
    image = NodeImage(ami="ami-00000000000000000")
    client("cloudformation").create_stack(
        StackName="sample", Capabilities=["CAPABILITY_IAM"], **body(template_of(tmp_path, image=image))
    )
    assert status(client) == "CREATE_COMPLETE"
    (group,) = client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    activities = client("autoscaling").describe_scaling_activities(AutoScalingGroupName=group["AutoScalingGroupName"])
    assert any(
        one["StatusCode"] == "Failed" and "Launching EC2 instance failed" in one["StatusMessage"]
        for one in activities["Activities"]
    )
    remove(client)


def test_syn_08_a_pinned_image_is_that_of_the_region(client, tmp_path):
    newest = client("ssm").get_parameter(Name=PARAMETER)["Parameter"]["Value"]
    pins = {PINS_CONTEXT: {"us-east-1": {PARAMETER: newest}, "us-west-2": {PARAMETER: "ami-00000000000000000"}}}
    client("cloudformation").create_stack(
        StackName="sample", Capabilities=["CAPABILITY_IAM"], **body(template_of(tmp_path, context=pins))
    )
    assert status(client) == "CREATE_COMPLETE"
    reservations = client("ec2").describe_instances()["Reservations"]
    images = {one["ImageId"] for each in reservations for one in each["Instances"] if one["State"]["Name"] == "running"}
    assert images == {newest}
    remove(client)


def body(template: dict[str, Any]) -> dict[str, str]:
    return {"TemplateBody": json.dumps(template)}


def status(client: Any) -> str:
    """The status in which the stack ends, with the reasons of failures where there are any."""
    formation = client("cloudformation")
    deadline = time.monotonic() + 120
    while (found := formation.describe_stacks(StackName="sample")["Stacks"][0]["StackStatus"]).endswith("_IN_PROGRESS"):
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
    events = formation.describe_stack_events(StackName="sample")["StackEvents"]
    reasons = [event.get("ResourceStatusReason", "") for event in events if "FAILED" in event["ResourceStatus"]]
    return " ".join([found, *reasons])


def remove(client: Any) -> None:
    """Delete the stack, and wait until it is gone."""
    client("cloudformation").delete_stack(StackName="sample")
    client("cloudformation").get_waiter("stack_delete_complete").wait(
        StackName="sample", WaiterConfig={"Delay": 1, "MaxAttempts": 120}
    )


def inventory(endpoint: str) -> dict[str, list[str]]:
    """What is in the account."""
    with urllib.request.urlopen(f"{endpoint}/_traincluster/resources?region=us-east-1", timeout=60) as answer:
        listed: dict[str, list[str]] = json.load(answer)
    return listed
