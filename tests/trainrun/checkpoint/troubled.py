"""Ranks that save and restore by a store which harms requests, in one group of processes: what `test_troubled` runs."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

import torch
from fault_store import Faults
from rank_programs import digest

from trainrun.checkpoint import state as state_module
from trainrun.errors import CheckpointError
from trainrun.models.gpt import GPT
from trainrun.optimizer import bundled
from trainrun.ranks import Ranks, join
from trainrun.run import Run
from trainrun.settle import settle
from trainrun.store import open_store

STEP_SECONDS = 0.01
"""That a step takes beside its passes, so that those which go on beside a save leave the machine to it."""

Case = list[dict[str, Any]]
"""The faults that all requests meet meanwhile: `fault_store.Fault`, as keywords."""


def run_rank(out: Path, *, saves: list[dict[str, Any]], restores: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The program of one rank.

    Args:
        saves: runs, each with its ``arguments`` and ``cases`` by name: a save for each.
        restores: by name: ``arguments``, the ``case``, and ``impatient``: whether reads are given up within seconds.
    """
    ranks = join(timeout_seconds=60.0, storage_timeout_seconds=60.0)
    results: dict[str, Any] = {}
    for run in saves:
        results |= _saves(ranks, **run)
    return results | {name: _restore(ranks, **restore) for name, restore in restores.items()}


def _saves(ranks: Ranks, *, arguments: list[str], cases: dict[str, Case]) -> dict[str, Any]:
    run, model, optimizer, data = _prepared(ranks, arguments)
    ended: list[tuple[str, dict[str, Any]]] = []
    run.event = lambda name, **details: ended.append((name, details)) if name in ("committed", "save_failed") else None  # type: ignore[method-assign]
    state = run.state(model=model, optimizer=optimizer, data=data)
    state.resume()
    results: dict[str, Any] = {}
    waiting = list(cases)
    name, begun, saved = "", (0, 0.0), ""
    for step in run.steps():
        for batch in data.micro_batches():
            run.backward(model.loss(batch))
        run.step(optimizer)
        time.sleep(STEP_SECONDS)
        if name and not ended:
            continue
        if name:
            [(event, details)] = ended
            reason = details.get("reason", "")
            results[name] = {"event": event, "reason": reason, "steps": step - begun[0], "seconds": time.monotonic() - begun[1]}
            results[name] |= {"digest": saved, "step": begun[0]}
            ended.clear()
        if not waiting:
            break
        name = waiting.pop(0)
        print(f"save: {name}, step {step}", flush=True)
        _arrange(ranks, cases[name])
        begun, saved = (step, time.monotonic()), digest(model.strategy, optimizer)
        assert state.save()
    state.close()
    return results


def _restore(ranks: Ranks, *, arguments: list[str], case: Case, impatient: bool) -> dict[str, Any]:
    print(f"restore: {case}", flush=True)
    run, model, optimizer, data = _prepared(ranks, arguments)
    if impatient:
        state_module.open_store = functools.partial(open_store, attempts=2, read_timeout_seconds=1.0)
    state = run.state(model=model, optimizer=optimizer, data=data)
    state_module.open_store = open_store
    _arrange(ranks, case)
    started = time.monotonic()
    try:
        return {"resumed": state.resume(), "digest": digest(model.strategy, optimizer), "seconds": time.monotonic() - started}
    except CheckpointError as error:
        return {"error": str(error), "seconds": time.monotonic() - started}
    finally:
        state.close()


def _prepared(ranks: Ranks, arguments: list[str]) -> tuple[Run, Any, Any, Any]:
    run = Run(settle(None, arguments), ranks, None)
    data = run.tokens()
    torch.manual_seed(0)
    gpt = GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    return run, *run.prepare(gpt, bundled(gpt, run.settings.optimizer)), data


def _arrange(ranks: Ranks, case: Case) -> None:
    """Let requests meet these faults and no others, from now on, for all ranks."""
    ranks.gather(None)
    if ranks.first:
        faults = Faults(os.environ["AWS_ENDPOINT_URL"])
        faults.heal()
        for fault in case:
            faults.fail(**fault)
    ranks.gather(None)
