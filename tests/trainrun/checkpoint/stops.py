"""Runs that are asked to stop at all sorts of moments, one after the other in the same ranks."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import writer_faults

from trainrun.checkpoint import process
from trainrun.checkpoint.layout import committed_steps
from trainrun.models.gpt import GPT
from trainrun.optimizer import bundled
from trainrun.ranks import Ranks, join, seed_everything
from trainrun.run import Run
from trainrun.settle import settle
from trainrun.store import open_store

ASKED = 1
"""The rank that is asked; the others know of nothing."""


@dataclass(kw_only=True)
class Asked:
    """One run and the request to it."""

    name: str
    phase: str
    """``start``, ``resume`` (before it), ``steps`` (after it), ``forward``, ``between`` (micro-batches), ``save`` (just before
    it), ``wait`` (while ``state.save(now=True)`` waits), ``time`` (after ``after`` seconds)."""
    step: int = 3
    text: str | None = None
    """Of the stop file; None is a SIGTERM."""
    every: int = 100
    slow: float = 0.0
    """Seconds that each write of a writer takes."""
    after: float = 0.0
    run: str = ""
    """The run's name, if not that of the case."""
    stop_seconds: float = 30.0


def run_rank(out: Path, *, arguments: list[str], cases: list[dict[str, Any]]) -> dict[str, Any]:
    """All cases; for each what `happened`."""
    ranks = join(timeout_seconds=60, storage_timeout_seconds=60)
    plain = process.PROGRAM
    found = {}
    for each in cases:
        case = Asked(**each)
        process.PROGRAM = plain
        if case.slow:
            writer_faults.fault(f"slow({case.slow})")
        found[case.name] = happened(case, ranks, out / case.name, arguments)
    return found


def happened(case: Asked, ranks: Ranks, state_directory: Path, arguments: list[str]) -> dict[str, Any]:
    """Train until asked to stop: exit code, steps done, seconds since the request, and which steps are committed."""
    state_directory.mkdir(parents=True)
    name = case.run or case.name
    asked_at = [0.0]

    def ask() -> None:
        asked_at[0] = time.monotonic()
        if case.text is None:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            (state_directory / "stop").write_text(case.text)

    def now(phase: str, step: int = 0) -> None:
        if ranks.rank == ASKED and case.phase == phase and step in (0, case.step):
            ask()

    ranks.gather(None)
    now("start")
    stopping = [f"--checkpoint.stop_seconds={case.stop_seconds}", f"--checkpoint.every_steps={case.every}"]
    settings = settle(None, [*arguments, *stopping, f"--run={name}"])
    seed_everything(0)
    run = Run(settings, ranks, state_directory)
    data = run.tokens()
    gpt = GPT(settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    model, optimizer = run.prepare(gpt, bundled(gpt, settings.optimizer))
    state = run.state(model=model, optimizer=optimizer, data=data)
    now("resume")
    resumed = state.resume()
    now("steps")
    timer = threading.Timer(case.after if case.phase == "time" else 0.3, ask)
    timer.daemon = True
    if ranks.rank == ASKED and case.phase == "time":
        timer.start()
    code: Any = 0
    try:
        for step in run.steps():
            for number, batch in enumerate(data.micro_batches()):
                if number == 1:
                    now("between", step)
                loss = model.loss(batch)
                now("forward", step)
                run.backward(loss)
            run.step(optimizer)
            now("save", step)
            if case.phase == "wait" and ranks.rank == ASKED and step == case.step:
                timer.start()
            state.save(now=case.phase == "wait" and step == case.step)
    except SystemExit as end:
        code = end.code
    ended = time.monotonic()
    timer.cancel()
    ranks.gather(None)
    return {
        "code": code,
        "resumed": resumed,
        "completed": run.completed,
        "seconds": ended - asked_at[0] if asked_at[0] else 0.0,
        "committed": committed_steps(open_store(settings.checkpoint.location).child(name)),
    }


def at_random_times(count: int, seed: int) -> list[dict[str, Any]]:
    """Cases for `run_rank`."""
    draw = random.Random(seed)
    return [
        {"name": f"time{n}", "phase": "time", "after": draw.uniform(0.0, 0.4), "every": draw.choice([2, 100])}
        for n in range(count)
    ]
