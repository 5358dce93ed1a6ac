"""The profiler's window: a trace in the run's folder, and nothing else that changes."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
import torch
from bundled_loop import train

from trainrun import devices
from trainrun.checkpoint.layout import committed_steps
from trainrun.config import ConfigError
from trainrun.run import Run
from trainrun.settings import ProfileSettings, TrainSettings
from trainrun.store import open_store

Start = Callable[..., Run]


def products(trace: bytes) -> int:
    """How often the trace's steps projected to logits, which the GPT does once a micro-batch."""
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    return sum(event.get("name") == "aten::nll_loss_forward" for event in events)


def test_the_window_is_traced_into_the_runs_folder_and_changes_nothing(
    alone: Start, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [f"--data={dataset}", "--steps=5", "--checkpoint.every_steps=2"]
    plain = train(alone(*common, f"--checkpoint.location={tmp_path / 'plain'}"))
    store = open_store(str(tmp_path / "profiled")).child("run")
    profiled = train(
        alone(*common, f"--checkpoint.location={tmp_path / 'profiled'}", "--profile.start_step=2", "--profile.steps=2")
    )
    for name, value in plain.state_dict().items():
        assert torch.equal(profiled.state_dict()[name], value), name
    key = "profile/step-000000002/rank-00000.json.gz"
    assert products(store.get(key)) == 2 * 2  # two steps of two micro-batches
    assert f"Profiled the steps 2 to 3: {store.locate(key)}" in capsys.readouterr().err
    assert committed_steps(store)[-1] == 5  # and what lies beside the checkpoints does not disturb them


def test_the_trace_goes_to_s3(alone: Start, dataset: str, bucket: str) -> None:
    train(alone(f"--data={dataset}", "--steps=2", f"--checkpoint.location=s3://{bucket}/runs", "--profile.start_step=2",
                "--profile.steps=1"))  # fmt: skip
    answer = boto3.client("s3").get_object(Bucket=bucket, Key="runs/run/profile/step-000000002/rank-00000.json.gz")
    assert products(answer["Body"].read()) == 2


def test_without_a_location_it_stays_in_the_state_directory(alone: Start, dataset: str, tmp_path: Path) -> None:
    train(alone(f"--data={dataset}", "--steps=1", "--profile.start_step=1", "--profile.steps=1"))
    assert products((tmp_path / "state/profile/step-000000001/rank-00000.json.gz").read_bytes()) == 2


def test_a_run_resumed_in_the_window_profiles_the_rest_and_one_beyond_it_nothing(
    alone: Start, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [f"--data={dataset}", f"--checkpoint.location={tmp_path}"]
    window = ["--profile.start_step=2", "--profile.steps=2"]
    train(alone(*common, "--steps=2"))
    train(alone(*common, "--steps=4", *window))
    assert products((tmp_path / "run/profile/step-000000003/rank-00000.json.gz").read_bytes()) == 2
    train(alone(*common, "--steps=5", *window))
    assert "Nothing is profiled: the steps 2 to 3 are done already." in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run/profile").iterdir()] == ["step-000000003"]


def test_a_profile_that_cannot_be_written_is_a_warning(
    alone: Start, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state/profile").write_text("in the way")
    train(alone(f"--data={dataset}", "--steps=2", "--profile.start_step=1", "--profile.steps=1"))
    assert "WARNING: the profile of the steps 1 to 1 is lost: " in capsys.readouterr().err


def test_a_window_beyond_the_last_step_is_an_error() -> None:
    TrainSettings(steps=10, profile=ProfileSettings(start_step=8, steps=3))
    with pytest.raises(ConfigError, match=r"start_step is 8 and profile\.steps is 4.*would be step 11, and the run has 10"):
        TrainSettings(steps=10, profile=ProfileSettings(start_step=8, steps=4))


def test_a_number_of_steps_without_a_first_one_is_an_error() -> None:
    with pytest.raises(ConfigError, match="steps is 5, but start_step is 0, which profiles nothing"):
        ProfileSettings(steps=5)
    assert ProfileSettings(steps=3) == ProfileSettings(), "the default is not told from what is not set"


def test_memory_is_recorded_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in: there is no CUDA here."""
    switched: list[Any] = []
    fake = SimpleNamespace(_record_memory_history=switched.append, _snapshot=lambda device: {"segments": [str(device)]})
    monkeypatch.setattr(torch.cuda, "memory", fake)
    cuda, cpu = torch.device("cuda", 1), torch.device("cpu")
    for device in (cuda, cpu):
        devices.record_memory(device, on=True)
        devices.record_memory(device, on=False)
    assert switched == ["all", None]
    record = devices.memory_record(cuda)
    assert record is not None
    assert pickle.loads(record) == {"segments": ["cuda:1"]}
    assert devices.memory_record(cpu) is None
