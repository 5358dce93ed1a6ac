"""Settings come in layers, and each knows what is wrong with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from trainrun.config import ConfigError
from trainrun.settings import OptimizerSettings
from trainrun.settle import settle
from trainrun.spec import ClusterSpec, JobSpec, RunSpec, StorageSpec


def test_later_layers_cover_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.yaml").write_text("steps: 5\nseed: 1\nprecision: bf16\noptimizer: {learning_rate: 3e-4, beta1: 0.8}\n")
    spec = RunSpec(
        run="first",
        region="us-east-1",
        cluster=ClusterSpec(name="c", instance_type="c7i.large", nodes_min=1, nodes_desired=1, nodes_max=1),
        job=JobSpec(entry_point="trainrun.pretrain", configuration={"seed": 2, "optimizer": {"beta1": 0.7}}),
        storage=StorageSpec(location="s3://bucket/runs"),
    )
    (tmp_path / "run.json").write_text(spec.to_json())
    monkeypatch.setenv("TRAINRUN_SPEC", str(tmp_path / "run.json"))
    settings = settle(None, [str(tmp_path / "s.yaml"), "--seed=3"])
    assert (settings.steps, settings.seed, settings.precision, settings.run) == (5, 3, "bf16", "first")
    assert (settings.optimizer.learning_rate, settings.optimizer.beta1, settings.optimizer.beta2) == (3e-4, 0.7, 0.95)
    assert settings.checkpoint.location == "s3://bucket/runs"
    assert settings.checkpoint.stop_seconds == 90, "what the agent gives the ranks"
    assert settle(None, ["--checkpoint.stop_seconds=20"]).checkpoint.stop_seconds == 20


def test_a_scripts_own_defaults_lie_under_everything(tmp_path: Path) -> None:
    own = {"steps": 3, "optimizer": {"learning_rate": 2e-5, "beta2": 0.999}}
    assert settle(None, [], defaults=own).optimizer == OptimizerSettings(learning_rate=2e-5, beta2=0.999)
    (tmp_path / "s.json").write_text(json.dumps({"optimizer": {"beta2": 0.9}}))
    settings = settle(tmp_path / "s.json", ["--steps=4"], defaults=own)
    assert (settings.steps, settings.optimizer.learning_rate, settings.optimizer.beta2) == (4, 2e-5, 0.9)
    with pytest.raises(ConfigError, match="Unknown setting 'stepz' in the script's defaults"):
        settle(None, [], defaults={"stepz": 3})


def test_a_deepspeed_file_lies_over_a_scripts_own_defaults_and_its_auto_becomes_them(tmp_path: Path) -> None:
    own = {"sequence_length": 32, "batch_tokens": 320, "optimizer": {"learning_rate": 2e-5, "weight_decay": 0.01, "beta2": 0.99}}
    parameters = {"lr": "auto", "weight_decay": 0.3, "betas": "auto"}
    document = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": parameters}}
    (tmp_path / "ds.json").write_text(json.dumps(document))
    settings = settle(None, [f"--deepspeed={tmp_path / 'ds.json'}"], defaults=own)
    optimizer = settings.optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.beta2) == (2e-5, 0.3, 0.99)
    assert settings.batch_tokens == 4 * 32, "in sequences of the script's length"
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}))
    assert settle(None, [f"--deepspeed={tmp_path / 'ds.json'}"], defaults=own).batch_tokens == 320


def test_errors_name_the_source_and_the_nearest_setting(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps({"stepz": 5}))
    with pytest.raises(ConfigError, match=r"Unknown setting 'stepz' in .*s\.json.*Did you mean 'steps'"):
        settle(tmp_path / "s.json", [])
    with pytest.raises(ConfigError, match=r"Unknown setting 'model\.widht'.*Did you mean 'width'"):
        settle(None, ["--model.widht=3"])


def test_the_dashes_that_keep_torchrun_from_an_argument_are_no_argument(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("steps: 5\n")
    settings = settle(None, [str(tmp_path / "s.yaml"), "--", "--run=second"])
    assert (settings.steps, settings.run) == (5, "second")


def test_arguments_that_are_no_overrides_say_how_to_write_them() -> None:
    with pytest.raises(ConfigError) as raised:
        settle(None, ["--strategy", "zero2", "--compile", "--seed=1", "-x"])
    assert raised.value.problems == (
        "'--strategy zero2' lacks an equals sign. Write --strategy=zero2.",
        "'--compile' is not an override. Write --name=value, for example --steps=500.",
        "'-x' is not an override. Write --name=value, for example --steps=500.",
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("s.yaml", "- 1", "holds list"), ("s.yaml", "a: [", "cannot be read"), ("s.json", "{", "cannot be read")],
)
def test_files_that_are_no_settings(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        settle(tmp_path / name, [])
    with pytest.raises(ConfigError, match="Could not read the settings file"):
        settle(tmp_path / "none", [])


def test_yaml_without_pyyaml_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.yaml").write_text("steps: 1")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match="needs PyYAML"):
        settle(tmp_path / "s.yaml", [])
