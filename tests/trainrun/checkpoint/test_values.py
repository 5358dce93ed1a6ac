"""What belongs to a run's state beside its tensors: loss scale, skipped steps, the optimizer's own counters, settings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainrun.checkpoint.layout import read_commit
from trainrun.config import ConfigError
from trainrun.models.gpt import GPT
from trainrun.optimizer import adamw, bundled
from trainrun.run import Run
from trainrun.store import open_store

Start = Callable[..., Run]


@dataclasses.dataclass
class Trained:
    """What came of some steps."""

    run: Run
    strategy: Any
    losses: list[float]
    rates: list[float]
    scales: list[float]
    parameters: list[torch.Tensor]
    optimizer: torch.optim.Optimizer


def train(alone: Start, dataset: str, folder: Path, until: int, *more: str, overflow_at: int = 0, make: Any = None) -> Trained:
    """Go on to step ``until`` of 8, with a checkpoint of every second step.

    Args:
        overflow_at: a step of whose two micro-batches one has a gradient that is not finite.
        make: makes the optimizer, given the model and its settings.
    """
    run = alone(
        f"--data={dataset}",
        "--steps=8",
        "--checkpoint.every_steps=2",
        f"--checkpoint.location={folder}",
        "--micro_batch=4",
        *more,
    )
    data = run.tokens()
    gpt = GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    model, optimizer = run.prepare(gpt, (make or bundled)(gpt, run.settings.optimizer))
    state = run.state(model=model, optimizer=optimizer, data=data)
    state.resume()
    trained = Trained(run, model.strategy, [], [], [], [], optimizer)
    for step in run.steps():
        trained.losses.append(0.0)
        for number, batch in enumerate(data.micro_batches()):
            loss = model.loss(batch)
            if (step, number) == (overflow_at, 1):
                loss.register_hook(lambda gradient: gradient * math.inf)
            trained.losses[-1] += float(loss.detach())
            run.backward(loss)
        run.step(optimizer)
        trained.rates.append(optimizer.param_groups[0]["lr"])
        if model.strategy.loss_scale is not None:
            trained.scales.append(model.strategy.loss_scale.value)
        state.save()
        if step == until:
            state.wait()
            break
    trained.parameters = [parameter.detach().clone() for parameter in gpt.parameters()]
    return trained


def test_num_04_scale_counts_and_schedule_after_a_skipped_step_are_the_same_after_a_restart(
    alone: Start, dataset: str, tmp_path: Path
) -> None:
    """A gradient overflows at step 3, with accumulation and clipping; the run restarts after step 4."""
    arguments = ("--precision=fp16", "--optimizer.clip_norm=1.0")
    whole = train(alone, dataset, tmp_path / "whole", 8, *arguments, overflow_at=3)
    first = train(alone, dataset, tmp_path / "runs", 4, *arguments, overflow_at=3)
    assert (first.scales[1], first.scales[2]) == (2.0**16, 2.0**15)
    rest = train(alone, dataset, tmp_path / "runs", 8, *arguments)
    assert len(rest.losses) == 4
    assert first.losses + rest.losses == whole.losses
    assert first.rates + rest.rates == whole.rates
    assert first.scales + rest.scales == whole.scales
    assert rest.strategy.skipped == whole.strategy.skipped == 1
    assert rest.strategy.loss_scale.state() == whole.strategy.loss_scale.state() == {"value": 2.0**15, "steps": 5}
    assert all(torch.equal(a, b) for a, b in zip(rest.parameters, whole.parameters, strict=True))


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ("fp16", "fp32", "The checkpoint has a loss scale, which fp32 has no use for: it is left out (written with fp16)."),
        ("fp16", "bf16", "The checkpoint has a loss scale, which bf16 has no use for: it is left out (written with fp16)."),
        ("fp32", "fp16", "The checkpoint has no loss scale (it was written with precision fp32): it begins anew for fp16."),
    ],
)
def test_another_precision_goes_on_and_says_what_is_not_carried(
    alone: Start, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str, now: str, told: str
) -> None:
    overflow_at = 1 if before == "fp16" else 0
    first = train(alone, dataset, tmp_path, 2, f"--precision={before}", overflow_at=overflow_at)
    capsys.readouterr()
    second = train(alone, dataset, tmp_path, 4, f"--precision={now}")
    assert told in capsys.readouterr().err.splitlines()
    assert second.run.completed == 4
    assert second.strategy.skipped == first.strategy.skipped == int(before == "fp16")
    assert second.scales == ([2.0**16] * 2 if now == "fp16" else [])
    assert second.losses[0] < first.losses[0]


def test_the_same_precision_says_nothing_of_it(
    alone: Start, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for until in (2, 4):
        train(alone, dataset, tmp_path, until, "--precision=fp16")
    assert "loss scale" not in capsys.readouterr().err


class CountingSGD(torch.optim.Optimizer):
    """Counts its steps by parameter in a plain number, as optimizers of others do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                parameter.data.add_(parameter.grad, alpha=-group["lr"] / state["count"])


def test_plain_numbers_of_an_optimizer_go_on(alone: Start, dataset: str, tmp_path: Path) -> None:
    def make(model: GPT, settings: Any) -> CountingSGD:
        return CountingSGD(model.parameters())

    whole = train(alone, dataset, tmp_path / "whole", 6, make=make)
    train(alone, dataset, tmp_path / "runs", 4, make=make)
    rest = train(alone, dataset, tmp_path / "runs", 6, make=make)
    assert {state["count"] for state in rest.optimizer.state.values()} == {6}
    assert rest.losses == whole.losses[4:]


def test_the_state_of_another_bundled_optimizer_is_refused(alone: Start, dataset: str, tmp_path: Path) -> None:
    train(alone, dataset, tmp_path, 2)
    with pytest.raises(ConfigError, match=r'trained by optimizer\.name "adamw", this run has "muon": their states'):
        train(alone, dataset, tmp_path, 4, "--optimizer.name=muon")


def test_the_state_of_another_optimizer_of_ones_own_is_refused(alone: Start, dataset: str, tmp_path: Path) -> None:
    def sgd(model: GPT, settings: Any) -> torch.optim.SGD:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    train(alone, dataset, tmp_path, 2, make=sgd)
    train(alone, dataset, tmp_path, 3, make=sgd)
    with pytest.raises(ConfigError, match=r"trained by the optimizer SGD, this run has AdamW: their states are not alike"):
        train(alone, dataset, tmp_path, 4, make=adamw)


def test_settings_in_a_commit_are_the_resolved_ones(alone: Start, dataset: str, tmp_path: Path) -> None:
    train(alone, dataset, tmp_path, 2, "--strategy=auto", "--micro_batch=auto", make=adamw)
    commit = read_commit(open_store(str(tmp_path / "run")), 2)
    assert commit.settings["strategy"] == "ddp"
    assert isinstance(commit.settings["micro_batch"], int)
    assert commit.mesh == {"replicate": 1}
