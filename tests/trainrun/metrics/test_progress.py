"""What a run writes about itself is what docs/metrics.md says, and asks nothing of the device that a plain loop would not."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainrun import devices
from trainrun.metrics import clock as clocks
from trainrun.metrics.clock import Clock
from trainrun.metrics.flops import ModelFlops
from trainrun.metrics.progress import Progress
from trainrun.models.gpt import GPT
from trainrun.optimizer import adamw
from trainrun.ranks import Ranks
from trainrun.run import Run
from trainrun.settings import TrainSettings

Start = Callable[..., Run]
DOCUMENT = Path(__file__).parents[3] / "docs/metrics.md"


def train(run: Run, *, during: Callable[[int], None] = lambda step: None) -> None:
    data = run.tokens()
    gpt = GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    model, optimizer = run.prepare(gpt, adamw(gpt, run.settings.optimizer))
    for step in run.steps():
        for batch in data.micro_batches():
            run.backward(model.loss(batch))
        during(step)
        run.step(optimizer)


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted((folder / "state/metrics").iterdir()) for line in path.open()]


def documented(section: str) -> set[str]:
    """The names in the first column of a section's table."""
    text = DOCUMENT.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    return {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}


def test_all_fields_are_written_and_documented(alone: Start, dataset: str, tmp_path: Path) -> None:
    train(alone(f"--data={dataset}", "--steps=2"))
    lines = written(tmp_path)
    steps = [line for line in lines if "event" not in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(set(line) == documented("Fields of a step") for line in steps)
    events = {line["event"] for line in lines if "event" in line}
    assert events <= documented("Events")
    last = steps[-1]
    assert (last["tokens"], last["world"], last["precision"]) == (256, 1, "fp32")
    assert (last["mfu"], last["mfu_convention"]) == (None, None)
    assert 0 <= last["data_wait"] < 1
    assert last["memory_bytes"] > 2**20
    assert last["tokens_per_second"] == pytest.approx(128 / last["seconds_per_step"])


def test_the_end_is_summed_up(alone: Start, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(alone(f"--data={dataset}", "--steps=3", "--strategy=ddp"))
    (finished,) = [line for line in written(tmp_path) if line.get("event") == "finished"]
    assert (finished["steps_here"], finished["tokens_here"], finished["skipped"]) == (3, 384, 0)
    assert finished["tokens_per_second"] == pytest.approx(384 / finished["seconds"])
    assert re.search(r"^Done at step 3: 3 steps and 384 tokens in 0:0\d, .* tok/s, 0 skipped\.$", capsys.readouterr().out, re.M)


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device: a tensor's value asked for, or a copy to the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.item, torch.ops.aten.equal):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("clip_norm", ["1.0", "0"])
def test_nothing_waits_for_the_device_but_a_logged_step(
    alone: Start, dataset: str, monkeypatch: pytest.MonkeyPatch, clip_norm: str
) -> None:
    run = alone(f"--data={dataset}", "--steps=6", "--log_every=3", f"--optimizer.clip_norm={clip_norm}")
    fetched: list[int] = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: fetched.append(run.completed) or original(tensor))
    with Waits() as waits:
        train(run)
    assert fetched == [3, 6]  # loss and norm together
    assert waits.seen == []


def test_the_mfu_is_flops_over_the_peak_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(clocks.time, "perf_counter", iter([0.0, 2.0, 2.0, 4.0]).__next__)
    ranks = Ranks(0, 4, 0, torch.device("cpu"), None, None)
    progress = Progress(TrainSettings(precision="bf16", steps=1), ranks, tmp_path)
    progress.describe(ModelFlops(6e9, "6P"))
    assert "MFU: 6P = 6GFLOP a token, over 989TFLOP/s for each NVIDIA H100 80GB HBM3 in bf16." in capsys.readouterr().err
    progress.begin(waited=1.0)
    progress.step(1, tokens=400_000)
    fields = {"loss": 1.0, "learning_rate": 1.0, "gradient_norm": 1.0, "tokens": 1, "skipped": 0}
    progress.report(1, waited=1.5, settings=TrainSettings(strategy="ddp"), **fields)
    progress.finish(1, skipped=0)
    line, finished = (json.loads(text) for path in tmp_path.iterdir() for text in path.open())
    assert line["mfu"] == pytest.approx(200_000 * 6e9 / (4 * 989e12))
    assert (line["mfu_convention"], line["data_wait"]) == ("6P", 0.25)
    assert finished["mfu"] == pytest.approx(line["mfu"] / 2)


def test_other_ranks_keep_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(TrainSettings(steps=1), Ranks(1, 2, 1, torch.device("cpu"), None, None), tmp_path)
    progress.describe(ModelFlops(1.0, "6P"))
    progress.begin(waited=0.0)
    progress.step(1, tokens=1)
    fields = {"loss": 1.0, "learning_rate": 1.0, "gradient_norm": 1.0, "tokens": 1, "skipped": 0}
    progress.report(1, waited=0.0, settings=TrainSettings(strategy="ddp"), **fields)
    progress.finish(1, skipped=0)
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_time_left_leaves_out_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(clocks.time, "perf_counter", iter([0.0, 100.0, 101.0, 103.0]).__next__)
    clock.start()
    for expected in (100.0, 1.0, 1.2):
        clock.step(10)
        assert clock.seconds_per_step == pytest.approx(expected)


def test_a_run_on_a_terminal_shows_its_bar_and_takes_it_away_even_when_it_fails(
    terminal: Any, alone: Start, dataset: str
) -> None:
    terminal.connect()
    terminal.resize(150)
    stdout = sys.stdout
    screens: list[list[str]] = []
    train(alone(f"--data={dataset}", "--steps=3", "--strategy=ddp"), during=lambda step: screens.append(terminal.screen()))
    assert re.match(r"\[#+-+\] 2/3  66\.7%  0:0\d left  .* tok/s$", screens[2][-1])
    assert [line.split("  ")[0] for line in terminal.screen()[:3]] == ["step 1/3", "step 2/3", "step 3/3"]
    assert terminal.screen()[3].startswith("Done at step 3")
    assert terminal.screen()[4:] == [""]

    def fail(step: int) -> None:
        if step == 2:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        train(alone(f"--data={dataset}", "--steps=3", "--strategy=ddp"), during=fail)
    assert sys.stdout is stdout
    assert terminal.screen()[-1] == ""
