"""The examples: each synthesized, linted, deployed to the emulated AWS and destroyed again."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest
from cdk_nag import AwsSolutionsChecks
from cfnlint.api import ManualArgs, lint

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = ("p5_capacity_block", "spot_fine_tuning", "trainium")

EFA_INTERFACES = {"p5_capacity_block": 32, "spot_fine_tuning": 4, "trainium": 8}
NODES = {"p5_capacity_block": 16, "spot_fine_tuning": 4, "trainium": 4}


@pytest.fixture(scope="module")
def assemblies(account, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each example as `cdk synth` makes it."""
    folder = tmp_path_factory.mktemp("assemblies")
    for name in NAMES:
        account.cdk("synth", "--quiet", "--output", folder / name, cwd=EXAMPLES / name)
    return {name: folder / name for name in NAMES}


def templates(assembly: Path) -> dict[str, dict[str, Any]]:
    return {path.name.partition(".")[0]: json.loads(path.read_text()) for path in assembly.glob("*.template.json")}


def test_there_is_no_other_example():
    assert {path.name for path in EXAMPLES.iterdir() if path.is_dir()} == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_every_example_uses_the_flags_of_the_repository(name):
    flags = [json.loads((folder / "cdk.json").read_text()) for folder in (ROOT, EXAMPLES / name)]
    assert flags[0] == flags[1]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_passes_cfn_lint(name, assemblies):
    for template in templates(assemblies[name]).values():
        # W6001: an output that repeats an import, since a person reads it where the run is.
        wanted = ManualArgs(regions=["us-east-1"], ignore_checks=["W6001"])
        assert [f"{one.rule.id} {one.message}" for one in lint(json.dumps(template), config=wanted)] == []


# IAM names objects by pattern: each is one folder of a bucket. The names hold those of exports, which exist only after
# synthesis, so that no code can acknowledge them beforehand.
PATTERNS = {
    "p5_capacity_block": ["P5Data:ExportsOutputFnGetAttCheckpoints620E2F20ArnC494AD10/gpt-3b/*"],
    "spot_fine_tuning": [
        "FineTuningData:ExportsOutputFnGetAttCheckpoints620E2F20ArnC494AD10/fine-tuning/*",
        "FineTuningData:ExportsOutputFnGetAttDatasetB87AF082Arn9B24F562/conversations/*",
        "arn:<AWS::Partition>:s3:::my-checkpoints/first-run/*",
    ],
    "trainium": ["TrainiumData:ExportsOutputFnGetAttCheckpoints620E2F20ArnC494AD10/trainium/*"],
}


@pytest.mark.parametrize("name", NAMES)
def test_an_example_passes_cdk_nag(name, tmp_path, monkeypatch):
    monkeypatch.setenv("CDK_OUTDIR", str(tmp_path))
    monkeypatch.setenv("CDK_CONTEXT_JSON", json.dumps(json.loads((ROOT / "cdk.json").read_text())["context"]))
    monkeypatch.chdir(EXAMPLES / name)
    checked = []

    def synth_checked(app: cdk.App) -> None:
        validations = cdk.Validations.of(app)
        validations.add_plugins(AwsSolutionsChecks(app))
        validations.acknowledge(
            *(
                cdk.Acknowledgment(id=f"AwsSolutions-IAM5[Resource::{pattern}]", reason="One folder of a bucket.")
                for pattern in PATTERNS[name]
            )
        )
        synth(app)  # raises on any finding
        checked.append(app)

    synth = cdk.App.synth
    monkeypatch.setattr(cdk.App, "synth", synth_checked)
    runpy.run_path("app.py", run_name="__main__")
    assert checked


@pytest.mark.parametrize("name", NAMES)
def test_an_examples_nodes_have_all_their_efa_interfaces(name, assemblies):
    resources = [one for template in templates(assemblies[name]).values() for one in template["Resources"].values()]
    (template,) = [one for one in resources if one["Type"] == "AWS::EC2::LaunchTemplate"]
    interfaces = template["Properties"]["LaunchTemplateData"]["NetworkInterfaces"]
    assert sum(one["InterfaceType"].startswith("efa") for one in interfaces) == EFA_INTERFACES[name]
    (group,) = [one for one in resources if one["Type"] == "AWS::AutoScaling::AutoScalingGroup"]
    assert group["Properties"]["MaxSize"] == str(NODES[name])


@pytest.mark.parametrize("name", NAMES)
def test_an_example_deploys_and_is_destroyed_to_nothing(name, account, assemblies):
    before = account.resources()
    account.cdk("deploy", "--all", "--require-approval", "never", "--app", assemblies[name], cwd=assemblies[name])
    nodes = account.resources()["AWS::EC2::Instance"] - before.get("AWS::EC2::Instance", set())
    assert len(nodes) == NODES[name]  # whatever EC2 would refuse to launch is not there
    account.cdk("destroy", "--all", "--force", "--app", assemblies[name], cwd=assemblies[name])
    left = account.resources()
    extra = {kind: names - before.get(kind, set()) for kind, names in left.items() if names - before.get(kind, set())}
    # What the synth says stays: the buckets of the data stack.
    assert set(extra) <= {"AWS::S3::Bucket", "AWS::S3::BucketPolicy"}, extra
    assert {kind for kind, names in before.items() if names - left.get(kind, set())} == set()


def test_the_fine_tuning_script_trains_on_from_an_earlier_run(tmp_path):
    """The one script that needs no accelerator: a base run of two steps, then three steps on top of its weights."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "training"), "BASE_CHECKPOINT": str(tmp_path / "base" / "run")}
    model = ["--batch_tokens=64", "--sequence_length=16", "--micro_batch=2", "--model.layers=1", "--model.width=16"]
    common = [f"--data={tmp_path / 'tokens'}", *model, "--model.heads=1"]

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    run("-m", "trainrun", "tokens", *(f"{number}.txt" for number in range(20)), "--out", "tokens")
    run("-m", "trainrun.pretrain", *common, "--steps=2", f"--checkpoint.location={tmp_path / 'base'}")
    script = EXAMPLES / "spot_fine_tuning" / "project" / "fine_tune.py"
    run(str(script), *common, "--steps=3", f"--checkpoint.location={tmp_path / 'tuned'}", "--run=tuned")
    printed = run("-m", "trainrun", "checkpoint", "ls", str(tmp_path / "tuned" / "tuned"))
    assert "3" in printed
