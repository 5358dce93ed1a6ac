"""Runs whose ranks are asked for a checkpoint by a file in their own state folders: what `test_save_request` runs."""

from __future__ import annotations

import os
import time
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


def run_rank(out: Path, *, arguments: list[str], cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All cases; for each what came of it."""
    ranks = join(timeout_seconds=60, storage_timeout_seconds=60)
    plain, found = process.PROGRAM, {}
    for name, case in cases.items():
        process.PROGRAM = plain
        if case.get("slow"):
            writer_faults.fault(f"slow({case['slow']})")
        found[name] = _train(name, case, ranks, out / name / str(ranks.rank), arguments)
    return found


def _train(name: str, case: dict[str, Any], ranks: Ranks, state_directory: Path, arguments: list[str]) -> dict[str, Any]:
    state_directory.mkdir(parents=True)
    request = state_directory / "save"
    asked = [step for rank, step in case["asked"] if rank == ranks.rank]
    if 0 in asked:  # before the process began
        request.write_text("long ago")
    settings = settle(None, [*arguments, *case.get("arguments", []), f"--run={name}"])
    seed_everything(0)
    run = Run(settings, ranks, state_directory)
    events: list[tuple[str, int]] = []
    known_at: dict[int, int] = {}

    def note(event: str, *, step: int | None = None, **_: Any) -> None:
        events.append((event, run.completed if step is None else step))
        if event == "committed":
            known_at[events[-1][1]] = run.completed

    run.event = note  # type: ignore[method-assign]
    data = run.tokens()
    gpt = GPT(settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    model, optimizer = run.prepare(gpt, bundled(gpt, settings.optimizer))
    state = run.state(model=model, optimizer=optimizer, data=data)
    state.resume()
    longest, last = 0.0, time.monotonic()
    for step in run.steps():
        if step in asked:
            request.write_text(f"{step}\n")
            os.utime(request, ns=(step, step))  # the time tells only that it is another request, so it may be a wrong one
        for batch in data.micro_batches():
            run.backward(model.loss(batch))
        run.step(optimizer)
        state.save()
        time.sleep(case.get("pause", 0.0))
        if step < settings.steps:  # the last one waits for its save
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
    return {
        "committed": committed_steps(open_store(settings.checkpoint.location).child(name)),
        "events": [event for event in events if event[0] in ("save_requested", "committed")],
        "known_at": known_at,
        "longest": longest,
        "is_there": request.exists(),
    }
