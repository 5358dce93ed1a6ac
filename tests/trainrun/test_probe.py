"""The micro-batch that fits is found without trying what does not, on all ranks alike, and leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from trainrun import devices, probe
from trainrun.config import ConfigError
from trainrun.data.batch import IGNORED, Batch
from trainrun.data.stream import TokenStream
from trainrun.models.gpt import GPT
from trainrun.optimizer import adamw
from trainrun.probe import Measured
from trainrun.ranks import Ranks
from trainrun.run import Run
from trainrun.settings import ModelSettings, TrainSettings
from trainrun.strategies.ddp import DDP

Start = Callable[..., Run]
ALONE = Ranks(0, 1, 0, torch.device("cpu"), None, None)


class Normalised(GPT):
    """The bundled GPT with all that a pass could leave behind: dropout, running statistics, draws of Python and NumPy."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.statistics = nn.BatchNorm1d(self.embedding.weight.shape[0], affine=False)

    def loss(self, batch: Batch) -> Tensor:
        logits = self.statistics(self(batch.inputs).float().flatten(0, 1))
        logits = F.dropout(logits, 0.1 + 0.1 * np.random.rand(), training=self.training)
        return F.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED, reduction="sum")


def trained(run: Run) -> tuple[Normalised, list[int]]:
    """The model after the run, and the sizes of the micro-batches."""
    data = run.tokens()
    gpt = Normalised(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    model, optimizer = run.prepare(gpt, adamw(gpt, run.settings.optimizer))
    sizes = []
    for _ in run.steps():
        for batch in data.micro_batches():
            sizes.append(len(batch.inputs))
            run.backward(model.loss(batch))
        run.step(optimizer)
    return gpt, sizes


def with_budget(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """Let so many bytes be there for a pass."""
    monkeypatch.setattr(probe, "PART_OF_FREE", 1.0)
    monkeypatch.setattr(devices, "memory", lambda device, local_size: devices.Memory(total=2**40, free=2**40))
    monkeypatch.setattr(probe, "_state_to_come", lambda optimizer, device: 2**40 - budget)


def measured(alone: Start, dataset: str) -> Measured:
    run = alone(f"--data={dataset}", "--micro_batch=auto", "--strategy=ddp")
    data = run.tokens()
    gpt = Normalised(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    _, optimizer = run.prepare(gpt, adamw(gpt, run.settings.optimizer))
    assert run._strategy is not None
    found = probe.fitting_micro_batch(run._strategy, optimizer, data, run.ranks)[1]
    assert found is not None
    return found


def test_a_run_that_was_measured_is_the_same_as_one_that_was_told(
    alone: Start, dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measured(alone, dataset)
    with_budget(monkeypatch, found.need(3))  # of 8 sequences three would fit; two divide them
    runs = {}
    for micro_batch in ("auto", "2"):
        run = alone(f"--data={dataset}", f"--micro_batch={micro_batch}", "--strategy=ddp", "--steps=3")
        np.random.seed(0)
        runs[micro_batch] = (run, *trained(run))
    (run, automatic, sizes), (_, told, expected) = runs["auto"], runs["2"]
    assert sizes == expected == [2] * 12
    for name, value in told.state_dict().items():
        assert torch.equal(automatic.state_dict()[name], value), name
    assert run.settings.micro_batch == 2
    assert "Micro-batch: 2 of a rank's 8 sequences a step. A pass over 2 took 208 KiB, each" in capsys.readouterr().err
    lines = [json.loads(line) for path in (tmp_path / "state/metrics").iterdir() for line in path.open()]
    (event,) = [line for line in lines if line.get("event") == "micro_batch"]
    assert (event["sequences"], event["share"]) == (2, 8)
    assert event["measured"]["budget"] == found.need(3)


def test_the_number_is_doubled_while_that_fits_for_certain_and_beyond_it_is_foretold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = TrainSettings(model=ModelSettings(layers=2, width=64, heads=2), sequence_length=64, batch_tokens=64 * 16)
    data = TokenStream(
        np.arange(64 * 40, dtype=np.uint16) % 300,
        **{"vocabulary": 300, "fingerprint": "f", "batch_tokens": 64 * 16, "sequence_length": 64, "micro_batch": 1, "seed": 0},
        ranks=ALONE,
    )
    gpt = GPT(settings.model, vocabulary=300, context=64)
    optimizer = adamw(gpt, settings.optimizer)
    strategy = DDP(settings, ALONE)
    strategy.prepare(gpt, optimizer)
    strategy.rehearse(data.sample(1))
    taken = {n: probe._peak_of_pass(strategy, data.sample(n), ALONE.device) for n in (1, 2, 4, 8, 16)}
    strategy.forget_gradients()
    assert all(taken[2 * n] <= 2 * taken[n] for n in (1, 2, 4, 8))  # why doubling is safe
    logits = 64 * 300 * 4
    assert taken[16] - taken[8] > 8 * 2 * logits  # they and their gradient, at least
    for tried, budget in {16: 2 * taken[8], 8: 2 * taken[8] - 1, 4: 2 * taken[2]}.items():
        with_budget(monkeypatch, budget)
        number, found = probe.fitting_micro_batch(strategy, optimizer, data, ALONE)
        assert found is not None
        assert (found.sequences, found.taken) == (tried, taken[tried])
        assert found.need(16) == pytest.approx(taken[16], rel=0.03)
        assert taken[number] <= budget
        assert number == 16 or taken[2 * number] > budget


@given(share=st.integers(1, 96), taken=st.integers(0, 100), per_sequence=st.integers(0, 100), budget=st.integers(-100, 3000))
def test_the_choice_divides_the_share_fits_and_is_the_largest_that_does(
    share: int, taken: int, per_sequence: int, budget: int
) -> None:
    most = Measured(sequences=1, taken=taken, per_sequence=per_sequence, budget=budget).most(share)
    assert share % most == 0
    assert most == 1 or taken + (most - 1) * per_sequence <= budget
    larger = [n for n in range(most + 1, share + 1) if share % n == 0]
    assert all(taken + (n - 1) * per_sequence > budget for n in larger)


def test_two_sequences_are_not_tried_where_they_might_not_fit(
    alone: Start, dataset: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_budget(monkeypatch, 1000)
    run = alone(f"--data={dataset}", "--micro_batch=auto", "--strategy=ddp", "--steps=1")
    sampled = []
    data = run.tokens()
    original = data.sample
    monkeypatch.setattr(data, "sample", lambda sequences: sampled.append(sequences) or original(sequences))
    monkeypatch.setattr(run, "tokens", lambda: data)
    assert trained(run)[1] == [1] * 8
    assert set(sampled) == {1}
    assert "Even that may not fit" in capsys.readouterr().err


def test_state_that_the_first_step_makes_is_counted_once() -> None:
    model = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    strategy = DDP(TrainSettings(strategy="ddp"), ALONE)
    assert probe._state_to_come(strategy.without_state(optimizer), ALONE.device) == 8 * 100
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert probe._state_to_come(strategy.without_state(optimizer), ALONE.device) == 0


def test_without_a_loss_or_data_a_number_is_asked_for(alone: Start, dataset: str) -> None:
    run = alone(f"--data={dataset}", "--micro_batch=auto", "--strategy=ddp")
    with pytest.raises(ConfigError, match=r"needs run\.tokens\(\) and run\.prepare\(\) before run\.steps\(\)"):
        next(run.steps())
    run.tokens()
    model = nn.Sequential(nn.Linear(2, 2))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(ConfigError, match=r"Sequential has no such method.*or set micro_batch to a number"):
        next(run.steps())


def test_all_ranks_take_what_the_tightest_of_them_can(ranks: Any, tiny: list[str], dataset: str) -> None:
    common = [*tiny, f"--data={dataset}", "--steps=2"]
    strategies = (
        ["--strategy=ddp"],
        ["--strategy=fsdp2"],
        ["--strategy=fsdp2", "--precision=bf16"],
        ["--strategy=zero2"],
        ["--strategy=zero3"],
    )
    configurations = [[*common, *own, f"--micro_batch={number}"] for own in strategies for number in ("auto", "2")]
    outcomes = ranks("probed", world=2, configurations=configurations)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].log + outcomes[1].log
    for outcome in outcomes:
        for automatic, told in zip(outcome.result[::2], outcome.result[1::2], strict=True):
            assert automatic["sizes"] == [2, 2] * 2
            assert automatic == told


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failed_allocation_ends_the_run_with_what_to_change(alone: Start, dataset: str, where: str) -> None:
    class Greedy(GPT):
        def loss(self, batch: Batch) -> Tensor:
            loss = super().loss(batch)
            if where == "forward":
                torch.empty(10**15)
            loss.register_hook(lambda gradient: torch.empty(10**15))
            return loss

    run = alone(f"--data={dataset}", "--strategy=ddp")
    data = run.tokens()
    gpt = Greedy(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    model, optimizer = run.prepare(gpt, adamw(gpt, run.settings.optimizer))
    expected = r"Out of memory on rank 0 \(cpu\) in step 1: .*can't allocate.*Set micro_batch to 2 \(it is 4\), or activation_che"
    with pytest.raises(MemoryError, match=expected):
        for _ in run.steps():
            for batch in data.micro_batches():
                run.backward(model.loss(batch))
            run.step(optimizer)


def test_another_error_is_handed_on_as_it_is(alone: Start, dataset: str) -> None:
    run = alone(f"--data={dataset}", "--strategy=ddp")
    data = run.tokens()
    gpt = GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    model, _ = run.prepare(gpt, adamw(gpt, run.settings.optimizer))
    with pytest.raises(RuntimeError, match="must match the size"):
        model.loss(Batch(inputs=torch.zeros(1, 17, dtype=torch.int64), targets=torch.zeros(1, 17, dtype=torch.int64)))
