"""What lies in a run's folder: checkpoints, whether their shards are there, and what never became one.

A listing and the COMMITs are read, no tensor: this says nothing of their content (see `trainrun.checkpoint.damage`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainrun.checkpoint.layout import COMMIT, Commit, Damaged, committed_steps, read_commit, step_directory, step_of
from trainrun.config import ConfigError, from_mapping
from trainrun.errors import CheckpointError
from trainrun.parallel import in_threads
from trainrun.settings.checkpoint import CheckpointSettings
from trainrun.store import Store, StoredObject, StoreKeyMissing

THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A checkpoint, or what is left of one."""

    step: int
    status: str
    """"committed": its COMMIT and all shards are there, as long as they were. "damaged": they are not, as ``problem`` says.
    "set aside": it was found damaged by a run, which took its COMMIT away. "incomplete": shards that no COMMIT names, of a save
    that is going on, failed or was killed."""
    time: float
    """Seconds since the epoch: of the commit, or of the newest object."""
    bytes: int
    attempt: str = ""
    problem: str = ""
    commit: Commit | None = None
    """When it could be read."""

    @property
    def age_seconds(self) -> float:
        return max(0.0, time.time() - self.time)


def list_checkpoints(store: Store, step: int | None = None) -> list[Listed]:
    """Everything below ``store``, a run's folder, by step; or what there is of one step.

    Raises:
        StoreError: it could not be listed or read.
    """
    steps: dict[int, list[StoredObject]] = {}
    for item in store.list("step-" if step is None else f"{step_directory(step)}/"):
        of = step_of(item.key)
        if of is not None:
            steps.setdefault(of, []).append(item)
    committed = [step for step, items in steps.items() if any(item.key == f"{step_directory(step)}/{COMMIT}" for item in items)]
    found: dict[int, Commit | Exception] = {}
    in_threads([partial(_read_into, found, store, step) for step in committed], THREADS)
    rows: list[Listed] = []
    for step, items in sorted(steps.items()):
        rows += _of_step(step, items, found.get(step))
    return rows


def structural_problem(commit: Commit, objects: Iterable[StoredObject]) -> str:
    """What a listing shows to be wrong with a commit's shards; empty when nothing."""
    sizes = {item.key: item.size for item in objects}
    for shard in commit.shards:
        if shard.key not in sizes:
            return f"{shard.key} is missing"
        if sizes[shard.key] != shard.length:
            return f"{shard.key} has {sizes[shard.key]} bytes instead of {shard.length}"
    return ""


def _read_into(found: dict[int, Commit | Exception], store: Store, step: int) -> None:
    try:
        found[step] = read_commit(store, step)
    except (Damaged, StoreKeyMissing, CheckpointError) as error:
        found[step] = error


def _of_step(step: int, items: list[StoredObject], found: Commit | Exception | None) -> Iterator[Listed]:
    attempts: dict[str, list[StoredObject]] = {}
    for item in items:
        attempts.setdefault(item.key.split("/")[1], []).append(item)
    own = ""
    if isinstance(found, Commit):
        own = found.attempt
        problem = structural_problem(found, items)
        status = "damaged" if problem else "committed"
        yield Listed(step=step, status=status, time=found.time, bytes=found.bytes, attempt=own, problem=problem, commit=found)
    elif found is not None:
        yield _leftover(step, "damaged", attempts[COMMIT], problem=str(found))
    for name, objects in attempts.items():
        if name.startswith("DAMAGED-"):
            yield _leftover(step, "set aside", objects)
        elif name not in (own, COMMIT):
            yield _leftover(step, "incomplete", objects, attempt=name)


def _leftover(step: int, status: str, objects: list[StoredObject], *, attempt: str = "", problem: str = "") -> Listed:
    newest = max(item.modified for item in objects)
    size = sum(item.size for item in objects)
    return Listed(step=step, status=status, time=newest, bytes=size, attempt=attempt, problem=problem)


def choose_step(store: Store, text: str) -> int:
    """The step that ``text``, a number or "latest", means.

    Raises:
        CheckpointError: there is no checkpoint of it.
    """
    steps = committed_steps(store)
    if not steps:
        raise CheckpointError(f"There is no checkpoint at {store.url}.")
    if text == "latest":
        return steps[-1]
    if not text.isdecimal():
        raise CheckpointError(f'{text!r} is no step. Write its number, or "latest". There are: {_written(steps)}.')
    if int(text) not in steps:
        evidence = [item.key for item in store.list(f"{step_directory(int(text))}/DAMAGED-")]
        if evidence:
            raise CheckpointError(
                f"The checkpoint of step {text} was found damaged by a run that resumed, and set aside: its COMMIT is now "
                f"{store.locate(evidence[-1])}. There are: {_written(steps)}."
            )
        raise CheckpointError(f"There is no checkpoint of step {text} at {store.url}. There are: {_written(steps)}.")
    return int(text)


def choose(store: Store, text: str) -> Commit:
    """The commit of that step, with its shards there as far as a listing shows.

    Raises:
        CheckpointError: there is none.
        Damaged: it is damaged.
    """
    step = choose_step(store, text)
    try:
        commit = read_commit(store, step)
    except StoreKeyMissing as error:
        raise Damaged(str(error)) from None
    if problem := structural_problem(commit, store.list(f"{step_directory(step)}/")):
        raise Damaged(f"{problem}. Of the run's checkpoints ({_written(committed_steps(store))}), name another")
    return commit


def _written(steps: list[int]) -> str:
    numbers = [str(step) for step in steps]
    return ", ".join(numbers if len(numbers) <= 12 else [*numbers[:3], "...", *numbers[-3:]])


def retention_settings(store: Store, *, keep: int, keep_every: int, keep_best: int, best: str | None) -> CheckpointSettings:
    """Settings for retention by hand. How long saves may take, and which metric is best unless given, the newest checkpoint says.

    Raises:
        ConfigError: they cannot be.
    """
    recorded: dict[str, Any] = {}
    steps = committed_steps(store)
    if steps:
        with contextlib.suppress(Damaged, StoreKeyMissing, CheckpointError):
            recorded = read_commit(store, steps[-1]).settings.get("checkpoint", {})
    own = {name: recorded[name] for name in ("timeout_seconds", *(["best"] if keep_best else [])) if name in recorded}
    if best is not None:
        if not keep_best:
            raise ConfigError([f"--best {best} says which to keep of the best, but not how many. Give --keep-best as well."])
        own["best"] = best
    wanted = {"keep": keep, "keep_every_steps": keep_every, "keep_best": keep_best, "every_steps": 1, **own}
    return from_mapping(CheckpointSettings, wanted, source="prune")
