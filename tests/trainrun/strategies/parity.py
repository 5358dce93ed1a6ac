"""Parity: every strategy takes the steps of one plain PyTorch loop on one process, which is written out here.

`train_all` trains several configurations in turn in one group of ranks (starting processes costs more than training a model
this small); `reference` trains the same in plain PyTorch without anything of trainrun's but the model and the order of the
data; `differences` compares, and `TOLERANCES` says how much may differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import numpy as np
import torch
import torch._dynamo.utils
import torch.nn.functional as F
from torch import Tensor

import trainrun.run
from trainrun.checkpoint.digest import gathered
from trainrun.config import ConfigError
from trainrun.data.batch import IGNORED, Batch
from trainrun.data.dataset import TRAIN, open_dataset
from trainrun.data.feed import Feed
from trainrun.data.order import sequence_at
from trainrun.data.stream import TokenStream
from trainrun.models.gpt import GPT
from trainrun.optimizer import bundled
from trainrun.prepare import PreparedModel
from trainrun.ranks import Ranks, join, seed_everything
from trainrun.run import Run
from trainrun.settings import TrainSettings
from trainrun.settle import settle
from trainrun.strategies.base import Strategy

TINY = (
    *("--sequence_length=16", "--batch_tokens=128", "--micro_batch=1"),  # 8 sequences a step: 8, 4 or 2 micro-batches a rank
    *("--model.layers=2", "--model.width=16", "--model.heads=2", "--model.norm_weights=true"),  # weights that do not decay, too
    *("--steps=50", "--optimizer.warmup_steps=5", "--optimizer.learning_rate=0.01", "--optimizer.clip_norm=0.5"),
    "--log_every=1000",  # a line looks at the norm, which for a skipped step is not finite
)
"""Trains in milliseconds a step, with steps that are clipped and steps that are not."""


@dataclass(frozen=True)
class Tolerance:
    """The largest difference from the reference that is let pass over 50 steps."""

    loss: float
    """Of any step's loss, in nats (losses are between 5.6 and 2)."""
    norm: float
    """Of any step's gradient norm before clipping, relative to the reference's."""
    parameters: float
    """Of any element of any final parameter (they are of the order of 0.1, and travel about that far)."""


TOLERANCES: dict[tuple[str, str], Tolerance] = {
    ("ddp", "fp32"): Tolerance(loss=5e-6, norm=1e-5, parameters=2e-5),
    ("fsdp2", "fp32"): Tolerance(loss=5e-6, norm=1e-5, parameters=2e-5),
    ("tp", "fp32"): Tolerance(loss=5e-6, norm=1e-5, parameters=2e-5),
    ("zero", "fp32"): Tolerance(loss=5e-6, norm=1e-5, parameters=2e-5),
    ("ddp", "bf16"): Tolerance(loss=5e-3, norm=2e-2, parameters=5e-2),
    ("fsdp2", "bf16"): Tolerance(loss=5e-3, norm=2e-2, parameters=5e-2),
    ("tp", "bf16"): Tolerance(loss=5e-3, norm=2e-2, parameters=5e-2),
    ("zero", "bf16"): Tolerance(loss=5e-3, norm=2e-2, parameters=5e-2),
    ("ddp", "fp16"): Tolerance(loss=1e-3, norm=5e-3, parameters=2e-2),
    ("fsdp2", "fp16"): Tolerance(loss=1e-3, norm=5e-3, parameters=2e-2),
    ("tp", "fp16"): Tolerance(loss=1e-3, norm=5e-3, parameters=2e-2),
    ("zero", "fp16"): Tolerance(loss=1e-3, norm=5e-3, parameters=2e-2),
}
"""By kind of strategy and precision, against the reference in fp32: what rounding does to 50 steps, and some times that
for other machines. A parameter whose gradient is too small for the precision takes a step of another size, for Adam divides by
the gradient's own size: hence the last column.
"""


@dataclass(frozen=True)
class Configuration:
    """What to train."""

    arguments: tuple[str, ...]
    """Overrides over `TINY`."""
    masked: bool = False
    """Whether targets are left out, of every sequence another number (`MaskedStream`)."""
    overflow_at: int = 0
    """A step whose gradient is made infinite: on the last rank only, in its first micro-batch. 0 for none."""
    frozen: tuple[str, ...] = ()
    """Names of parameters that do not train."""
    meta: bool = False
    """Whether the model is made on the meta device."""

    def settings(self, dataset: str) -> TrainSettings:
        return settle(None, [*TINY, f"--data={dataset}", *self.arguments])


@dataclass(frozen=True)
class Trained:
    """What came of it; the same on all ranks, which `train_all` asserts of all but the parameters (those of rank 0)."""

    losses: list[float] = dataclasses.field(default_factory=list)
    """Per step, over all valid tokens of the global batch."""
    norms: list[float] = dataclasses.field(default_factory=list)
    """Per step, of the whole gradient before clipping."""
    rates: list[list[float]] = dataclasses.field(default_factory=list)
    """Per step, of each of the optimizer's groups."""
    skipped: int = 0
    parameters: dict[str, np.ndarray[Any, Any]] = dataclasses.field(default_factory=dict)
    """Whole, in fp32."""
    loss_scale: float = 0.0
    """At the end; 0 without."""
    kept: bool = True
    """Whether the step at which the gradient was made infinite left all parameters as they were, bit for bit."""
    compiled: int = 0
    """Functions that torch.compile compiled."""
    error: str = ""
    """The ConfigError with which the configuration was refused, on all ranks alike."""


# The reference


def reference(dataset: str, configuration: Configuration, *, skip: Sequence[int] = ()) -> Trained:
    """One process, one batch, plain PyTorch, fp32.

    Args:
        configuration: its strategy, precision and micro-batch are of no meaning here.
        skip: steps whose update is left out.
    """
    own = [a for a in configuration.arguments if a.startswith(_MATTERS)]
    return _reference(dataset, dataclasses.replace(configuration, arguments=tuple(own), overflow_at=0, meta=False), tuple(skip))


_MATTERS = ("--optimizer.", "--model.", "--steps", "--batch_tokens", "--sequence_length", "--seed")


@functools.cache
def _reference(dataset: str, configuration: Configuration, skip: tuple[int, ...]) -> Trained:
    settings = configuration.settings(dataset)
    assert (settings.optimizer.name, settings.optimizer.schedule) == ("adamw", "cosine")
    opened = open_dataset(dataset)
    tokens = opened.tokens(TRAIN)
    length, warmup = settings.sequence_length, settings.optimizer.warmup_steps
    model = _model(settings, opened.description.vocabulary, configuration)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.optimizer.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], betas=(settings.optimizer.beta1, settings.optimizer.beta2)
    )
    losses, norms, rates = [], [], []
    sequences, count = settings.batch_tokens // length, (len(tokens) - 1) // length
    for step in range(1, settings.steps + 1):
        positions = np.arange((step - 1) * sequences, step * sequences, dtype=np.uint64)
        starts = sequence_at(positions, count=count, seed=settings.seed).astype(np.int64) * length
        batch = torch.from_numpy(np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64))
        inputs, targets = batch[:, :-1], batch[:, 1:].clone()
        if configuration.masked:
            _mask(targets, positions)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="mean")
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, settings.optimizer.clip_norm or math.inf)
        if step <= warmup:
            fraction = step / warmup
        else:
            cosine = math.cos(math.pi * (step - warmup) / (settings.steps - warmup))
            fraction = settings.optimizer.final_fraction + (1 - settings.optimizer.final_fraction) * (1 + cosine) / 2
        for group in optimizer.param_groups:
            group["lr"] = settings.optimizer.learning_rate * fraction
        if step not in skip:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
        rates.append([group["lr"] for group in optimizer.param_groups])
    parameters = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return Trained(losses=losses, norms=norms, rates=rates, skipped=len(skip), parameters=parameters)


def _model(settings: TrainSettings, vocabulary: int, configuration: Configuration) -> GPT:
    seed_everything(settings.seed)
    with torch.device("meta" if configuration.meta else "cpu"):
        model = GPT(settings.model, vocabulary=vocabulary, context=settings.sequence_length)
    for name in configuration.frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def _valid(positions: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
    """Valid targets of the sequences at ``positions``: of neighbours, very different numbers."""
    counts: np.ndarray[Any, Any] = 1 + positions.astype(np.int64) * 7 % length
    return counts


def _mask(targets: Tensor, positions: np.ndarray[Any, Any]) -> None:
    valid = torch.from_numpy(_valid(positions, targets.shape[1]))
    targets[torch.arange(targets.shape[1]) >= valid[:, None]] = IGNORED


class MaskedStream(TokenStream):
    """A stream whose micro-batches have different numbers of valid targets."""

    @property
    def valid_tokens(self) -> int:
        positions = np.arange(self.position, self.position + self._batch)
        return int(_valid(positions, self.sequence_length).sum())

    _read_step = Feed._read_step  # micro-batch by micro-batch, by `_read`

    def _read(self, positions: np.ndarray[Any, np.dtype[np.uint64]]) -> tuple[Tensor, ...]:
        (both,) = super()._read(positions)
        targets = both[:, 1:].clone()
        _mask(targets, positions)
        return both[:, :-1], targets

    def _as_batch(self, *tensors: Tensor) -> Batch:
        return Batch(*tensors)


# Comparison


@dataclass(frozen=True)
class Differences:
    """The largest ones."""

    loss: float
    norm: float
    parameters: float
    parameter: str
    """The parameter with the largest difference."""

    def within(self, tolerance: Tolerance) -> bool:
        """Whether none is too large (one that is not a number is)."""
        return self.loss <= tolerance.loss and self.norm <= tolerance.norm and self.parameters <= tolerance.parameters


def differences(trained: Trained, expected: Trained) -> Differences:
    """How far ``trained`` is from ``expected``; steps that were skipped (whose norm is not finite) count by their loss only."""
    assert not trained.error, trained.error
    assert len(trained.losses) == len(expected.losses)
    assert trained.parameters.keys() == expected.parameters.keys()
    by_name = {}
    for name, wanted in expected.parameters.items():
        assert trained.parameters[name].shape == wanted.shape, name
        by_name[name] = float(np.abs(trained.parameters[name].astype(np.float64) - wanted).max())
    parameter = max(by_name, key=lambda name: by_name[name] if by_name[name] == by_name[name] else math.inf)
    norms, wanted_norms = np.array(trained.norms), np.array(expected.norms)
    taken = np.isfinite(norms)
    assert (~taken).sum() == trained.skipped
    return Differences(
        loss=float(np.abs(np.array(trained.losses) - expected.losses).max()),
        norm=float((np.abs(norms - wanted_norms) / wanted_norms)[taken].max()),
        parameters=by_name[parameter],
        parameter=parameter,
    )


def check(trained: Trained, expected: Trained, kind: str, precision: str) -> Differences:
    """Assert that ``trained`` agrees with ``expected`` as `TOLERANCES` says, and that its learning rates are the same."""
    found = differences(trained, expected)
    assert found.within(TOLERANCES[kind, precision]), f"{kind}, {precision}: {found}"
    np.testing.assert_allclose(trained.rates, expected.rates, rtol=1e-12)
    return found


# Ranks


class RunsRanks(Protocol):
    """The fixture ``ranks``."""

    def __call__(self, program: str, *, world: int, longest: float, **keywords: Any) -> list[Any]: ...


def train_all(
    ranks: RunsRanks, dataset: str, configurations: dict[str, Configuration], *, world: int, longest: float = 120.0
) -> dict[str, Trained]:
    """Train each of ``configurations``, in turn, on the same ``world`` gloo ranks.

    Args:
        longest: seconds that all of it may take.
    """
    plain = {name: dataclasses.asdict(configuration) for name, configuration in configurations.items()}
    outcomes = ranks("parity", world=world, longest=longest, dataset=dataset, configurations=plain)
    logs = "\n".join(f"rank {number}: {outcome.log}" for number, outcome in enumerate(outcomes))
    assert [outcome.code for outcome in outcomes] == [0] * world, logs
    found = {}
    for name in configurations:
        first = outcomes[0].result[name]
        for outcome in outcomes[1:]:
            assert outcome.result[name] == first, f"{name}: the ranks differ: {first} {outcome.result[name]}\n{logs}"
        path = outcomes[0].folder / f"{name}.npz"
        parameters = dict(np.load(path)) if path.exists() else {}
        found[name] = Trained(**first, parameters=parameters)
    return found


def run_rank(out: Path, *, dataset: str, configurations: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The program of one rank (see `rank_programs`)."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(out.parent / "compiled")  # for all ranks and configurations
    joined = join(timeout_seconds=60.0, storage_timeout_seconds=60.0)
    results, began = {}, time.monotonic()
    for name, plain in configurations.items():
        plain = {key: tuple(value) if isinstance(value, list) else value for key, value in plain.items()}
        torch._dynamo.reset()  # of one process it compiles the same code only so often
        torch._dynamo.utils.counters.clear()
        try:
            trained = train(joined, dataset, Configuration(**plain))
        except ConfigError as error:
            trained = Trained(error=str(error))
        if joined.first and not trained.error:
            np.savez(out / f"{name}.npz", **trained.parameters)
        results[name] = dataclasses.asdict(dataclasses.replace(trained, parameters={}))
        results[name].pop("parameters")
        seconds = f"{time.monotonic() - began:.1f} s"
        print(f"{name} after {seconds}: {json.dumps(results[name])}", flush=True)  # for the test that fails
    return results


def train(joined: Ranks, dataset: str, configuration: Configuration) -> Trained:
    """Train by trainrun, on ranks that have met."""
    settings = configuration.settings(dataset)
    run = Run(settings, dataclasses.replace(joined, tensor_parallel=settings.sharding.tensor_parallel), None)
    with mock.patch.object(trainrun.run, "TokenStream", MaskedStream if configuration.masked else TokenStream):
        data = run.tokens()
    gpt = _model(settings, data.vocabulary, configuration)
    if not (joined.first or configuration.meta):  # rank 0's weights have to become everyone's
        with torch.no_grad():
            for parameter in gpt.parameters():
                parameter.add_(1.0)
    model, optimizer = run.prepare(gpt, bundled(gpt, settings.optimizer))
    losses, rates, kept = [], [], True
    with _recorded_norms(model) as norms:
        for step in run.steps():
            total = torch.zeros(())
            for number, batch in enumerate(data.micro_batches()):
                loss = model.loss(batch)
                total += loss.detach() / data.valid_tokens
                if step == configuration.overflow_at and number == 0 and joined.rank == joined.size - 1:
                    loss.register_hook(lambda gradient: gradient * math.inf)
                run.backward(loss)
            if step == configuration.overflow_at:
                before = whole_parameters(model.strategy)
            run.step(optimizer)
            if step == configuration.overflow_at:
                kept = all(np.array_equal(value, before[name]) for name, value in whole_parameters(model.strategy).items())
            losses.append(float(run.ranks.sum(total)) / run.ranks.tensor_parallel)
            rates.append([group["lr"] for group in optimizer.param_groups])
    return Trained(
        losses=losses,
        norms=norms,
        rates=rates,
        skipped=model.strategy.skipped,
        loss_scale=model.strategy.loss_scale.value if settings.precision == "fp16" else 0.0,
        kept=kept,
        compiled=torch._dynamo.utils.counters["frames"]["ok"],
        parameters=whole_parameters(model.strategy),
    )


@contextlib.contextmanager
def _recorded_norms(model: PreparedModel) -> Iterator[list[float]]:
    norms: list[float] = []
    update = model.strategy.update

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        norm = update(*args, **kwargs)
        norms.append(float(norm))
        return norm

    with mock.patch.object(model.strategy, "update", recorded):
        yield norms


def whole_parameters(strategy: Strategy) -> dict[str, np.ndarray[Any, Any]]:
    """All of every parameter in fp32, by the parts of which checkpoints are made; on rank 0, the others help."""
    names = {f"model/{name}" for name, _ in strategy.module.named_parameters()}
    whole = gathered([part for part in strategy.model_parts() if part.name in names], strategy.ranks)
    return {name.removeprefix("model/"): tensor.float().numpy().copy() for name, tensor in whole}
