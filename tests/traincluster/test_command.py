"""The command: the list of rules, and the pin of an image, looked up in an emulated AWS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from traincluster import NodeImage
from traincluster.command import main
from traincluster.image import PINS_CONTEXT
from traincluster.rules import rules

ROOT = Path(__file__).parents[2]
AMI = "ami-0123456789abcdef0"
PARAMETER = NodeImage.for_type("p5.48xlarge").ami


def test_every_rule_is_listed(capsys):
    assert main(["rules"]) == 0
    text = capsys.readouterr().out
    for each in rules():
        assert f"{each.name} ({', '.join(each.levels)})" in text


def test_an_image_is_looked_up_pinned_and_its_pin_moved(emulated_aws, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("AWS_ENDPOINT_URL", emulated_aws)
    file = tmp_path / "cdk.context.json"
    file.write_text(json.dumps({"availability-zones:account=1:region=us-east-1": ["us-east-1a"], "x": {"y": 1}}))
    arguments = ["pin-image", "--instance-type", "p5.48xlarge", "--region", "us-east-1", "--file", str(file)]
    assert main(arguments) == 0
    context = json.loads(file.read_text())
    newest = context[PINS_CONTEXT]["us-east-1"][PARAMETER]
    assert newest.startswith("ami-") and context["x"] == {"y": 1}
    assert f"is pinned to {newest}" in capsys.readouterr().out

    assert main([*arguments, "--ami", AMI]) == 0  # back to an older one
    assert f"moves from {newest} to {AMI}" in capsys.readouterr().out
    assert main(arguments) == 0
    assert f"moves from {AMI} to {newest}" in capsys.readouterr().out
    assert main(arguments) == 0
    assert f"stays at {newest}" in capsys.readouterr().out


def test_each_region_and_parameter_has_a_pin_of_its_own(tmp_path):
    file = tmp_path / "cdk.context.json"
    for region in ("us-east-1", "us-west-2"):
        for parameter in (PARAMETER, "/mine"):
            assert main(["pin-image", "--parameter", parameter, "--region", region, "--ami", AMI, "--file", str(file)]) == 0
    pins = json.loads(file.read_text())[PINS_CONTEXT]
    assert pins == {region: {"/mine": AMI, PARAMETER: AMI} for region in ("us-east-1", "us-west-2")}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--instance-type", "p5.48xlarg"], "Did you mean p5.48xlarge"),
        (["--instance-type", "p5.48xlarge", "--os", "rhel-9"], "publishes no deep-learning image"),
        (["--parameter", "/no/such/parameter"], "cannot be looked up"),
        (["--parameter", AMI, "--ami", AMI], "Pin the id of an image for an SSM parameter"),
        (["--parameter", "/mine", "--ami", "/other"], "Pin the id of an image for an SSM parameter"),
        (["--parameter", "/mine", "--ami", "latest"], "Give the id of an image"),
    ],
)
def test_what_cannot_be_pinned_is_told_in_a_sentence(arguments, says, emulated_aws, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("AWS_ENDPOINT_URL", emulated_aws)
    file = tmp_path / "cdk.context.json"
    assert main(["pin-image", "--region", "us-east-1", "--file", str(file), *arguments]) == 1
    assert says in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({PINS_CONTEXT: {"us-east-1": "latest"}})])
def test_a_context_file_that_is_none_is_left_alone(text, tmp_path, capsys):
    file = tmp_path / "cdk.context.json"
    file.write_text(text)
    arguments = ["pin-image", "--parameter", "/mine", "--ami", AMI, "--region", "us-east-1", "--file", str(file)]
    assert main(arguments) == 1
    assert capsys.readouterr().err
    assert file.read_text() == text


def test_a_region_is_needed(monkeypatch, capsys):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    assert main(["pin-image", "--parameter", "/mine", "--ami", AMI]) == 1
    assert "Name the cluster's by --region" in capsys.readouterr().err


def test_it_runs_as_a_module():
    paths = os.pathsep.join(str(ROOT / name) for name in ("constructs", "training"))
    done = subprocess.run(
        [sys.executable, "-m", "traincluster", "rules"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "image-is-pinned (warning)" in done.stdout
