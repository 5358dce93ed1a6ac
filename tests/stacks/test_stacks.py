"""The two reference stacks: what each holds, how they are tied, and that equal input gives equal bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest
from aws_cdk.assertions import Annotations, Match, Template
from cdk_nag import AwsSolutionsChecks
from cfnlint.api import ManualArgs, lint

import constructs
from stacks.settings import read_settings
from stacks.training_cluster_stack import TrainingClusterStack
from stacks.training_data_stack import TrainingDataStack

ROOT = Path(__file__).parents[2]
RESERVATION = "cr-0123456789abcdef0"


class Stacks:
    """Both stacks, as app.py makes them."""

    def __init__(self, outdir: Path, **context: str) -> None:
        self.app = cdk.App(context=json.loads((ROOT / "cdk.json").read_text())["context"], outdir=str(outdir))
        settings = read_settings(context, default_file=ROOT / "cluster.yaml")
        self.data = TrainingDataStack(self.app, "TrainingDataStack", region=settings.region)
        self.cluster = TrainingClusterStack(
            self.app,
            "TrainingClusterStack",
            settings=settings,
            checkpoints=self.data.checkpoints,
            datasets=self.data.datasets,
        )

    def template(self, stack: cdk.Stack) -> dict[str, Any]:
        template: dict[str, Any] = Template.from_stack(stack).to_json()
        return template


@pytest.fixture(scope="module")
def make_stacks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Stacks]:
    return lambda **context: Stacks(tmp_path_factory.mktemp("assembly"), **context)


@pytest.fixture(scope="module")
def stacks(make_stacks: Callable[..., Stacks]) -> Stacks:
    return make_stacks()


def test_constructs_is_the_pypi_package_here_too():
    assert "site-packages" in constructs.__file__
    assert constructs.Construct in TrainingDataStack.__mro__


def test_the_data_stack_keeps_all_that_it_holds(stacks):
    resources = stacks.template(stacks.data)["Resources"].values()
    assert sorted(one["Type"] for one in resources) == [
        "AWS::KMS::Key",
        "AWS::S3::Bucket",
        "AWS::S3::Bucket",
        "AWS::S3::BucketPolicy",
        "AWS::S3::BucketPolicy",
    ]
    assert all(one["DeletionPolicy"] == one["UpdateReplacePolicy"] == "Retain" for one in resources)
    assert all("BucketName" not in one.get("Properties", {}) for one in resources)


def test_the_cluster_stack_keeps_nothing(stacks):
    resources = stacks.template(stacks.cluster)["Resources"].values()
    assert not any(one.get("DeletionPolicy", "Delete") != "Delete" for one in resources)


def test_no_stack_needs_code_that_runs_in_lambda(stacks):
    for stack in (stacks.data, stacks.cluster):
        types = {one["Type"] for one in stacks.template(stack)["Resources"].values()}
        assert not any("Lambda" in kind or kind.startswith(("Custom::", "AWS::CloudFormation::")) for kind in types)


def test_the_outputs(stacks):
    assert {"CheckpointBucketName", "DatasetBucketName"} <= set(stacks.template(stacks.data)["Outputs"])
    outputs = stacks.template(stacks.cluster)["Outputs"]
    commands = {"SessionCommand", "JupyterCommand", "TensorBoardCommand"}
    assert set(outputs) == {"AutoScalingGroupName", "MissingNodesCommand", "RunLocation", "LogGroupName", *commands}
    assert all("aws ssm start-session" in json.dumps(outputs[name]["Value"]) for name in commands)
    assert r"{\"portNumber\":[\"6006\"]" in json.dumps(outputs["TensorBoardCommand"]["Value"])
    assert outputs["RunLocation"]["Value"]["Fn::Join"][1][-1] == "/first-run"


def test_the_data_is_referred_to_across_the_stacks(stacks):
    text = json.dumps(stacks.template(stacks.cluster))
    exported = {output["Export"]["Name"] for output in stacks.template(stacks.data)["Outputs"].values() if "Export" in output}
    assert exported
    assert all(json.dumps({"Fn::ImportValue": name}) in text for name in exported)
    assert "GetStackOutput" not in text


def test_neither_stack_looks_anything_up(stacks):
    manifest = json.loads(Path(stacks.app.synth().directory, "manifest.json").read_text())
    assert "missing" not in manifest


def test_dataset_of_another_bucket_may_be_read(make_stacks):
    stacks = make_stacks(data="s3://elsewhere/corpus/v2")
    text = json.dumps(stacks.template(stacks.cluster)["Resources"])
    assert ":s3:::elsewhere/corpus/v2/*" in text
    assert r"\"data\":\"s3://elsewhere/corpus/v2\"" in text


def test_reserved_capacity_asks_for_its_zone(make_stacks):
    warning = Match.string_like_regexp("availability_zone is not set")
    stacks = make_stacks(instance_type="p5.48xlarge", capacity=f"block:{RESERVATION}")
    Annotations.from_stack(stacks.cluster).has_warning("*", warning)
    stacks = make_stacks(instance_type="p5.48xlarge", capacity=f"block:{RESERVATION}", availability_zone="us-east-1a")
    Annotations.from_stack(stacks.cluster).has_no_warning("*", warning)


def test_both_stacks_are_in_the_region_of_the_settings(make_stacks):
    stacks = make_stacks(instance_type="p5en.48xlarge", region="us-east-1")
    assert {stack.region for stack in (stacks.data, stacks.cluster)} == {"us-east-1"}
    subnets = [one for one in stacks.template(stacks.cluster)["Resources"].values() if one["Type"] == "AWS::EC2::Subnet"]
    assert {one["Properties"]["AvailabilityZoneId"] for one in subnets} == {"use1-az2"}
    manifest = json.loads(Path(stacks.app.synth().directory, "manifest.json").read_text())
    assert "missing" not in manifest  # a look-up would need credentials


def test_tear_06_all_logs_have_a_group_with_an_end(make_stacks):
    stacks = make_stacks(log_days="7", flow_log_days="3")
    groups = [one for one in stacks.template(stacks.cluster)["Resources"].values() if one["Type"] == "AWS::Logs::LogGroup"]
    assert sorted(one["Properties"]["RetentionInDays"] for one in groups) == [3, 7]
    assert all(one["DeletionPolicy"] == "Delete" and "LogGroupName" not in one["Properties"] for one in groups)


def test_what_stays_is_told_at_synth(make_stacks):
    stacks = make_stacks(volumes='[{"size_gib": 100, "path": "/data", "keep": true}]')
    Annotations.from_stack(stacks.data).has_info("*", Match.string_like_regexp("leaves.*checkpoint bucket; the dataset bucket"))
    Annotations.from_stack(stacks.cluster).has_info("*", Match.string_like_regexp("leaves.*100 GiB volume /data of each node"))
    Annotations.from_stack(make_stacks().cluster).has_no_info("*", Match.string_like_regexp("leaves in the account"))


def test_an_existing_placement_group_by_name(make_stacks):
    stacks = make_stacks(placement_group="mine")
    (template,) = [
        one for one in stacks.template(stacks.cluster)["Resources"].values() if one["Type"] == "AWS::EC2::LaunchTemplate"
    ]
    assert template["Properties"]["LaunchTemplateData"]["Placement"] == {"GroupName": "mine"}


@pytest.mark.parametrize(
    "context",
    [
        {},
        {"instance_type": "p5.48xlarge", "capacity": f"block:{RESERVATION}"},
        {"instance_type": "trn1.32xlarge", "isolated": "true", "training.batch_tokens": "1048576"},
    ],
)
def test_both_stacks_pass_cfn_lint_and_cdk_nag(context, make_stacks):
    stacks = make_stacks(**context)
    for stack in (stacks.data, stacks.cluster):
        # W6001: an output that repeats an import. RunLocation does, since a person reads it where the run is.
        wanted = ManualArgs(regions=["us-east-1"], ignore_checks=["W6001"])
        findings = lint(json.dumps(stacks.template(stack)), config=wanted)
        assert [f"{finding.rule.id} {finding.message}" for finding in findings] == []
    stacks = make_stacks(**context)  # a plugin has to be there before the first synthesis
    cdk.Validations.of(stacks.app).add_plugins(AwsSolutionsChecks(stacks.app))
    cdk.Validations.of(stacks.cluster).acknowledge(*EXPORTED_PATTERNS)
    stacks.app.synth()  # raises on any finding


# These names hold the exports' names, which exist only after synthesis: no code can acknowledge them beforehand.
EXPORTED_PATTERNS = [
    cdk.Acknowledgment(
        id=f"AwsSolutions-IAM5[Resource::TrainingDataStack:ExportsOutputFnGetAtt{export}/{folder}/*]",
        reason="IAM names objects by pattern: this is one folder of the bucket.",
    )
    for export, folder in (("Checkpoints620E2F20ArnC494AD10", "first-run"), ("Datasets0030EE04Arn3BA423B5", "corpus"))
]


def test_syn_08_two_runs_of_the_app_are_byte_identical(start_app, tmp_path):
    """In processes of their own, with other hash seeds and other folders."""
    apps = [start_app(tmp_path / str(seed), hash_seed=seed) for seed in (1, 2)]
    for app in apps:
        _, errors = app.communicate(timeout=120)
        assert app.returncode == 0, errors
    files = sorted(path.name for path in (tmp_path / "1").iterdir() if path.name.endswith((".json", ".xz")))
    compared = [name for name in files if name.endswith((".template.json", ".assets.json", ".xz"))]
    assert len(compared) == 5
    for name in compared:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name


def test_the_app_refuses_ill_settings_without_a_traceback(start_app, tmp_path):
    app = start_app(tmp_path, instance_type="p5.48xlarg", nodes="2", capacity="sport")
    output, errors = app.communicate(timeout=120)
    assert app.returncode == 1
    assert "Traceback" not in output + errors
    assert "Did you mean p5.48xlarge" in errors and "capacity is 'sport'" in errors


def test_the_app_refuses_a_cluster_that_could_not_run_without_a_traceback(start_app, tmp_path):
    app = start_app(tmp_path, efa="true")
    output, errors = app.communicate(timeout=120)
    assert app.returncode == 1
    assert "Traceback" not in output + errors
    assert "efa is true, but c7i.2xlarge has no EFA" in errors


def test_the_app_tells_all_findings_of_the_rules_at_once_without_a_traceback(start_app, tmp_path):
    app = start_app(
        tmp_path,
        instance_type="p5.48xlarge",
        nodes="80",
        capacity=f"block:{RESERVATION}",
        placement_group="true",
        root_volume_gib="30",
    )
    _, errors = app.communicate(timeout=120)
    assert app.returncode == 1
    assert "Traceback" not in errors
    for rule in ("block-takes-no-placement-group", "block-size", "root-volume-holds-image"):
        assert f"[{rule}]" in errors
