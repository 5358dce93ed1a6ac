"""A rank that saves very often, and looks at what it and its writer hold meanwhile: what `test_many` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainrun.models.gpt import GPT
from trainrun.optimizer import bundled
from trainrun.ranks import join
from trainrun.run import Run
from trainrun.settle import settle


def run_rank(out: Path, *, arguments: list[str], look_at: list[int]) -> dict[str, Any]:
    """Save at each step; what is held after some of them, by process, and which processes there were."""
    run = Run(settle(None, arguments), join(timeout_seconds=60.0, storage_timeout_seconds=60.0), None)
    data = run.tokens()
    gpt = GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    model, optimizer = run.prepare(gpt, bundled(gpt, run.settings.optimizer))
    state = run.state(model=model, optimizer=optimizer, data=data)
    state.resume()
    found = {}
    for step in run.steps():
        for batch in data.micro_batches():
            run.backward(model.loss(batch))
        run.step(optimizer)
        assert state.save()
        if step in look_at:
            state.wait()
            found[str(step)] = {"trainer": _held("self"), **{f"writer {pid}": _held(pid) for pid in _children()}}
    return found


def _children() -> list[str]:
    return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def _held(pid: str) -> dict[str, int]:
    """Bytes that only this process has, its part of shared memory (the arena), and open files."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    kilobytes = {name: int(value.split()[0]) for name, value in lines.items()}
    own = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    return {"own": own * 1024, "shared": kilobytes["Pss_Shmem"] * 1024, "files": len(list(Path(f"/proc/{pid}/fd").iterdir()))}
