"""Ranks whose saves meet one trouble after the other, in one group of processes: what `test_saving_beside` runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import writer_faults
from rank_programs import Odd
from torch import nn

from trainrun.checkpoint import process
from trainrun.checkpoint.digest import tensors_digest
from trainrun.errors import CheckpointError
from trainrun.optimizer import bundled
from trainrun.ranks import Ranks, join
from trainrun.run import Run
from trainrun.settle import settle
from trainrun.strategies.base import Strategy


def run_rank(out: Path, *, scenarios: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The program of one rank: `_train` for each scenario, in turn."""
    ranks = join(timeout_seconds=60.0, storage_timeout_seconds=60.0)
    results = {}
    clean = process.PROGRAM
    for name, keywords in scenarios.items():
        print(f"scenario {name}", flush=True)
        results[name] = _train(ranks, **keywords)
        process.PROGRAM = clean
    return results


def _train(
    ranks: Ranks,
    *,
    arguments: list[str],
    fault: tuple[int, str] | None = None,
    pause: float = 0.0,
    change_on: int | None = None,
) -> dict[str, Any]:
    """Train to the end, or to the error that ends it.

    Args:
        arguments: of the run.
        fault: a rank, and the call of `writer_faults` that its first writer makes.
        pause: seconds that each step sleeps beside its passes.
        change_on: a rank that adds to a weight of its own after the first save.
    """
    settings = settle(None, arguments)
    run = Run(settings, ranks, None)
    events = []
    run.event = lambda name, *, step=None, **details: events.append((name, run.completed if step is None else step, details))  # type: ignore[method-assign]
    data = run.tokens()
    torch.manual_seed(ranks.rank)
    model = Odd(settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    prepared, optimizer = run.prepare(model, bundled(model, settings.optimizer))
    state = run.state(model=prepared, optimizer=optimizer, data=data)
    clean = process.PROGRAM
    if fault is not None and fault[0] == ranks.rank:
        writer_faults.fault(fault[1])
    result: dict[str, Any] = {"resumed": state.resume(), "restored": _digest(prepared.strategy, optimizer), "saved": {}}
    result["longest"], last = 0.0, time.monotonic()
    try:
        for step in run.steps():
            for batch in data.micro_batches():
                run.backward(prepared.loss(batch))
            run.step(optimizer)
            if state.save():
                process.PROGRAM = clean
                result["saved"][str(step)] = _digest(prepared.strategy, optimizer)
                _change(model, ranks, change_on)
            if ranks.size > 1:
                dist.all_reduce(torch.ones(1))
            result["longest"], last = max(result["longest"], time.monotonic() - last), time.monotonic()
            time.sleep(pause)
    except CheckpointError as error:
        result["error"] = str(error)
    return {**result, "events": events}


def _digest(strategy: Strategy, optimizer: torch.optim.Optimizer) -> str:
    """Of what all ranks have alike: not of statistics of their own batches."""
    buffers = {f"model/{name}" for name, _ in strategy.module.named_buffers()}
    parts = sorted([*strategy.model_parts(), *strategy.optimizer_parts(optimizer)], key=lambda part: (part.name, part.start))
    return tensors_digest((part.name, part.local) for part in parts if part.name not in buffers)


def _change(model: nn.Module, ranks: Ranks, rank: int | None) -> None:
    if rank == ranks.rank:
        with torch.no_grad():
            model.get_parameter("scale").add_(1.0)
