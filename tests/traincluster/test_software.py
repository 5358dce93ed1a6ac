"""What a node runs its job with, from the settings to the template: containers, requirements, conda."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest
from aws_cdk.assertions import Template

from traincluster import CheckpointBucket, TrainingCluster, TrainingJob, TrainingNetwork
from trainrun.spec import ConfigError

DIGEST = "sha256:" + "0" * 64
ECR = f"123456789012.dkr.ecr.us-west-2.amazonaws.com/team/train@{DIGEST}"


def make(outdir: Path, *, isolated: bool = False, region: str = "us-west-2", **job: Any) -> tuple[cdk.Stack, TrainingCluster]:
    stack = cdk.Stack(cdk.App(outdir=str(outdir)), "Stack", env=cdk.Environment(region=region))
    cluster = TrainingCluster(
        stack,
        "Cluster",
        network=TrainingNetwork(stack, "Network", isolated=isolated),
        checkpoints=CheckpointBucket(stack, "Checkpoints"),
        job=TrainingJob(run="r", **job),
        instance_type="c7i.2xlarge",
        nodes=2,
    )
    return stack, cluster


def resources(stack: cdk.Stack, kind: str) -> list[dict[str, Any]]:
    template = Template.from_stack(stack).to_json()
    return [one["Properties"] for one in template["Resources"].values() if one["Type"] == kind]


def warnings(cluster: TrainingCluster) -> str:
    return "\n".join(str(e.data) for one in cluster.node.find_all() for e in one.node.metadata if e.type == "aws:cdk:warning")


def statements(stack: cdk.Stack, action: str) -> list[dict[str, Any]]:
    """The statements of the nodes' role that name an action."""
    found = [s for policy in resources(stack, "AWS::IAM::Policy") for s in policy["PolicyDocument"]["Statement"]]
    return [s for s in found if action in ([s["Action"]] if isinstance(s["Action"], str) else s["Action"])]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "more").mkdir(parents=True)
    (folder / "train.py").write_text("print(1)\n")
    (folder / "requirements.txt").write_text("einops==0.8.1  # for the model\n-r more/base.txt\n")
    (folder / "more/base.txt").write_text("tiktoken\n-c ../limits.txt\n")
    (folder / "limits.txt").write_text("regex<2027\n")
    (folder / "environment.yml").write_text("dependencies: [pytorch]\n")
    return folder


@pytest.mark.parametrize("container", ["", ECR], ids=["on the node", "in a container"])
def test_boot_07_the_metadata_service_takes_tokens_only_and_answers_containers(tmp_path, container):
    stack, _ = make(tmp_path, container=container)
    (template,) = resources(stack, "AWS::EC2::LaunchTemplate")
    options = template["LaunchTemplateData"]["MetadataOptions"]
    assert options["HttpTokens"] == "required"
    assert options["HttpPutResponseHopLimit"] >= 2


def test_nodes_may_pull_from_the_one_repository_of_ecr_that_the_job_names(tmp_path):
    stack, _ = make(tmp_path, container=ECR)
    (pull,) = statements(stack, "ecr:BatchGetImage")
    assert sorted(pull["Action"]) == ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
    arn = {"Fn::Join": ["", ["arn:", {"Ref": "AWS::Partition"}, ":ecr:us-west-2:123456789012:repository/team/train"]]}
    assert pull["Resource"] == arn
    assert [s["Resource"] for s in statements(stack, "ecr:GetAuthorizationToken")] == ["*"]


@pytest.mark.parametrize("container", ["", f"pytorch/pytorch@{DIGEST}", f"public.ecr.aws/x/y@{DIGEST}"])
def test_nodes_have_no_right_to_ecr_that_they_do_not_need(tmp_path, container):
    stack, _ = make(tmp_path, container=container)
    assert "ecr:" not in json.dumps(resources(stack, "AWS::IAM::Policy"))


def test_isolated_nodes_reach_ecr_by_endpoints_and_are_warned_of_other_registries(tmp_path):
    def endpoints(stack: cdk.Stack) -> list[str]:
        names = [json.dumps(one["ServiceName"]) for one in resources(stack, "AWS::EC2::VPCEndpoint")]
        return sorted(name for end in ("ecr.api", "ecr.dkr") for name in names if end in name)

    stack, cluster = make(tmp_path / "own", isolated=True, container=ECR)
    assert len(endpoints(stack)) == 2
    assert "container" not in warnings(cluster)
    stack, cluster = make(tmp_path / "none", isolated=True)
    assert not endpoints(stack)
    _, cluster = make(tmp_path / "hub", isolated=True, container=f"pytorch/pytorch@{DIGEST}")
    assert "docker.io, where isolated nodes have no way to" in warnings(cluster)
    _, cluster = make(tmp_path / "far", isolated=True, region="eu-west-1", container=ECR)
    assert "ECR in us-west-2, while isolated nodes in eu-west-1" in warnings(cluster)


def test_a_tag_without_a_digest_is_warned_of(tmp_path):
    _, cluster = make(tmp_path, container="pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime")
    assert "container-not-pinned" in warnings(cluster) or "a tag, which may mean another image" in warnings(cluster)


def test_requirements_reach_the_node_and_its_right_to_their_folder(tmp_path, source):
    stack, cluster = make(tmp_path, isolated=True, source=source, entry_point="train.py", requirements="requirements.txt")
    assert cluster.run_spec.job.requirements == "requirements.txt"
    assert "/software/*" in json.dumps(statements(stack, "s3:PutObject"))
    assert "isolated nodes reach no index of packages" in warnings(cluster)
    stack, _ = make(tmp_path / "without", source=source, entry_point="train.py")
    assert "/software/*" not in json.dumps(statements(stack, "s3:PutObject"))


def test_conda_reaches_the_node_and_is_warned_of(tmp_path, source):
    _, cluster = make(tmp_path, source=source, entry_point="train.py", conda="environment.yml")
    assert cluster.run_spec.job.conda == "environment.yml"
    assert "AWS's newer PyTorch images have none" in warnings(cluster)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"container": ECR, "requirements": "requirements.txt"}, "container and requirements are set"),
        ({"requirements": "requirements.txt", "conda": "environment.yml"}, "requirements and conda are set"),
        ({"container": "Not An Image"}, "names no image"),
        ({"container": "repository/train", "launcher": "mpirun"}, "the launcher is mpirun"),
        ({"container_python": "python3.12"}, "there is no container"),
        ({"container": "repository/train", "container_python": ""}, "container_python is empty"),
        ({"container": 7}, "container is 7. Allowed: text"),
        ({"requirements": "needs.txt"}, "names 'needs.txt', which is not in the job's source"),
        ({"requirements": "/requirements.txt"}, "Give a file of the job's source"),
        ({"requirements": "../requirements.txt"}, "Give a file of the job's source"),
        ({"conda": "env.yml"}, "conda is 'env.yml', which is not in the job's source"),
        ({"source": None, "entry_point": "trainrun.pretrain", "conda": "env.yml"}, "Set source"),
    ],
)
def test_what_cannot_be_or_would_be_ignored_is_refused(source, fields, words):
    with pytest.raises(ConfigError, match=words):
        TrainingJob(**{"run": "r", "source": source, "entry_point": "train.py", **fields})


@pytest.mark.parametrize("line", ["-e .", "./package", "/opt/wheel.whl", "mine @ file:///wheel.whl", "--editable src"])
def test_requirements_that_mean_files_of_this_machine_are_refused(source, line):
    (source / "more/base.txt").write_text(f"einops\n{line}\n")
    with pytest.raises(ConfigError, match="has the line"):
        TrainingJob(run="r", source=source, entry_point="train.py", requirements="requirements.txt")


def test_a_file_that_requirements_name_must_be_packed_too(source):
    (source / "limits.txt").unlink()
    with pytest.raises(ConfigError, match=r"names 'limits\.txt', which"):
        TrainingJob(run="r", source=source, entry_point="train.py", requirements="requirements.txt")
