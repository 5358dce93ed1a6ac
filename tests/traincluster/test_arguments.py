"""Arguments of the wrong kind are refused by name, in a sentence."""

import aws_cdk as cdk
import pytest
from aws_cdk import aws_ec2 as ec2

from traincluster import CheckpointBucket, TrainingCluster, TrainingJob, TrainingNetwork


@pytest.fixture
def stack():
    return cdk.Stack(cdk.App(), "Stack")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"nodes": "4"}, "nodes is '4'. Allowed: a whole number."),
        ({"nodes": 2.5}, "nodes is 2.5. Allowed: a whole number."),
        ({"nodes": True}, "nodes is True. Allowed: a whole number."),
        ({"capacity": "spot"}, "Capacity.parse('spot') reads the text of cluster.yaml"),
        ({"instance_type": ec2.InstanceType("p5.48xlarge")}, "Give the type's name, such as 'p5.48xlarge'"),
        ({"checkpoints": "my-bucket"}, "checkpoints is 'my-bucket'"),
        ({"checkpoints": None}, "checkpoints is None"),
        ({"job": {"run": "a"}}, "job is a dict. Allowed: a TrainingJob."),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named(stack, wrong, sentence):
    given = {
        "instance_type": "c7i.2xlarge",
        "nodes": 2,
        "job": TrainingJob(run="a"),
        "checkpoints": CheckpointBucket(stack, "Runs"),
    }
    with pytest.raises(ValueError) as error:
        TrainingCluster(stack, "Cluster", network=TrainingNetwork(stack, "Network"), **{**given, **wrong})
    assert sentence in str(error.value)


def test_all_wrong_arguments_are_named_together(stack):
    with pytest.raises(ValueError) as error:
        TrainingCluster(stack, "Cluster", network=ec2.Vpc(stack, "V"), instance_type=1, nodes="x", job=None, checkpoints=None)
    assert [line.partition(" is ")[0] for line in str(error.value).splitlines()] == [
        "network",
        "instance_type",
        "nodes",
        "job",
        "checkpoints",
    ]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"arguments": "--x 1"}, "arguments is '--x 1'. Allowed: a list of texts"),
        ({"arguments": ["--x", 1]}, "Allowed: a list of texts"),
        ({"environment": {"A": 1}}, "environment gives A the value 1. Allowed: text."),
        ({"run": 7}, "run is 7. Allowed: text"),
    ],
)
def test_a_job_of_the_wrong_kind_is_refused(wrong, sentence):
    with pytest.raises(ValueError) as error:
        TrainingJob(**{"run": "a", **wrong})
    assert sentence in str(error.value)


def test_a_source_without_an_entry_point_is_told_to_name_one(tmp_path):
    with pytest.raises(ValueError, match="no entry_point is set"):
        TrainingJob(run="a", source=tmp_path)


def test_a_region_is_no_zone(stack):
    with pytest.raises(ValueError, match="'us-east-1', which is no zone"):
        TrainingNetwork(stack, "Network", availability_zone="us-east-1")
