"""Which checkpoints stay, and in which order the others go: COMMIT first, so that nothing is ever found half gone.

Kept are the newest commits, those that the settings keep for their step or their metric, and whatever is not known to be
a run's rubbish: what may just be being written, what was set aside as damaged not long ago, and other versions' commits.

No torch: this runs in the process that writes checkpoints.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from trainrun.checkpoint.layout import COMMIT, Damaged, commit_key, read_commit, step_of
from trainrun.errors import CheckpointError
from trainrun.settings.checkpoint import CheckpointSettings
from trainrun.store import Store, StoredObject, StoreKeyMissing

EVIDENCE_SECONDS = 7 * 24 * 3600.0
"""For so long a damaged checkpoint stays that was set aside, for people to look at."""

_SET_ASIDE = re.compile(r"DAMAGED-.*")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `Retention` found, and what it would do."""

    kept: dict[int, tuple[str, ...]]
    """The whole commits that stay, by step, and what for: "newest", "step", "metric"."""
    damaged: dict[int, str]
    """Commits that are known to be damaged, or are another version's, and why. They count for nothing, and stay for a while."""
    deleted_steps: tuple[int, ...]
    """Whose commits go."""
    commits: tuple[StoredObject, ...]
    """The COMMITs of these steps, which are deleted before anything else."""
    objects: tuple[StoredObject, ...]
    """Their shards, and what nobody will ever commit."""

    @property
    def bytes(self) -> int:
        """What becomes free."""
        return sum(item.size for item in (*self.commits, *self.objects))


class Retention:
    """Keeps a run's folder as its settings say. Commits are read once in the life of this object, not at every call."""

    def __init__(self, store: Store, settings: CheckpointSettings) -> None:
        """Args:
        store: the run's folder.
        settings: ``keep``, ``keep_every_steps``, ``keep_best`` and ``best``; what is older than two ``timeout_seconds``, and in
            no commit, can no longer become one.
        """
        self._store, self._settings = store, settings
        self._known: dict[StoredObject, _Commit] = {}

    def prune(self, *, in_flight: Iterable[str] = ()) -> Plan:
        """Delete what the settings do not keep.

        Args:
            in_flight: attempts that are being written, which are left alone however long that takes.

        Returns:
            What was done.

        Raises:
            StoreError: something could not be read or deleted; the next call goes on.
        """
        plan = self.plan(in_flight=in_flight)
        if plan.commits:
            self._store.delete([item.key for item in plan.commits])
        if plan.objects:
            self._store.delete([item.key for item in plan.objects])
        return plan

    def plan(self, *, in_flight: Iterable[str] = ()) -> Plan:
        """What `prune` would do."""
        steps = _by_step(self._store.list("step-"))
        # The store's own clock, as far as it shows: machines' clocks differ, and objects are as old as it says.
        now = max((item.modified for objects in steps.values() for item in objects), default=0.0)
        commits = self._look_at(steps)
        whole = {step: commit for step, commit in commits.items() if not commit.problem}
        kept = _kept(whole, self._settings)
        doomed = (whole.keys() - kept.keys()) | _outlived(commits, kept, since=now - EVIDENCE_SECONDS)
        ages = _Ages(abandoned=now - 2 * self._settings.timeout_seconds, evidence=now - EVIDENCE_SECONDS)
        spared = set(in_flight)
        rubbish: list[StoredObject] = []
        for step, objects in steps.items():
            if step in doomed:
                rubbish += _of_doomed(objects, commits[step].attempt, spared, ages)
            elif step in kept:
                rubbish += _of_kept(objects, commits[step].attempt, spared, ages)
            elif step not in commits:
                rubbish += _abandoned(objects, spared, ages)
        return Plan(
            kept=kept,
            damaged={step: commit.problem for step, commit in commits.items() if commit.problem},
            deleted_steps=tuple(sorted(doomed)),
            commits=tuple(commits[step].item for step in sorted(doomed)),
            objects=tuple(rubbish),
        )

    def _look_at(self, steps: Mapping[int, list[StoredObject]]) -> dict[int, _Commit]:
        """The commits, each read at most once, and held against what lies beside them."""
        known = {}
        commits = {}
        for step, objects in steps.items():
            key = commit_key(step)
            item = next((item for item in objects if item.key == key), None)
            if item is not None:
                known[item] = self._known.get(item) or _read(self._store, step, item)
                commits[step] = _held_against(known[item], objects, self._store)
        self._known = known
        return commits


@dataclass(frozen=True, kw_only=True)
class _Commit:
    """What retention wants to know of a commit."""

    item: StoredObject
    attempt: str = ""
    metric: float | None = None
    shards: Mapping[str, int] = field(default_factory=dict)
    """Length by key."""
    problem: str = ""
    """Why it is none that a run could be restored from."""
    foreign: bool = False
    """Whether it is another version's, to which it may be whole."""


@dataclass(frozen=True, kw_only=True)
class _Ages:
    """Moments, by the store's clock."""

    abandoned: float
    """An attempt to which nothing was added since then is nobody's."""
    evidence: float
    """What was set aside since then stays."""


def _read(store: Store, step: int, item: StoredObject) -> _Commit:
    try:
        commit = read_commit(store, step)
    except (Damaged, StoreKeyMissing) as error:
        return _Commit(item=item, problem=str(error))
    except CheckpointError as error:
        return _Commit(item=item, problem=str(error), foreign=True)
    shards = {shard.key: shard.length for shard in commit.shards}
    return _Commit(item=item, attempt=commit.attempt, metric=commit.metric, shards=shards)


def _held_against(commit: _Commit, objects: Iterable[StoredObject], store: Store) -> _Commit:
    """The commit, with its problem if a shard is not there as long as it was."""
    sizes = {each.key: each.size for each in objects}
    for key, length in commit.shards.items():
        if key not in sizes:
            return replace(commit, problem=f"{store.locate(key)} is missing")
        if sizes[key] != length:
            return replace(commit, problem=f"{store.locate(key)} has {sizes[key]} bytes instead of {length}")
    return commit


def _kept(whole: Mapping[int, _Commit], settings: CheckpointSettings) -> dict[int, tuple[str, ...]]:
    """The steps that stay, each with what for."""
    newest = sorted(whole)[-settings.keep :]
    firsts: dict[int, int] = {}
    if settings.keep_every_steps:
        for step in sorted(whole):
            firsts.setdefault(step // settings.keep_every_steps, step)
        firsts.pop(0, None)  # of what comes before the first multiple
    sign = 1 if settings.best == "lowest" else -1
    ranked = sorted(
        (sign * commit.metric, -step)
        for step, commit in whole.items()
        if commit.metric is not None and math.isfinite(commit.metric)
    )
    best = [-step for _, step in ranked[: settings.keep_best]]
    reasons = {"newest": newest, "step": firsts.values(), "metric": best}
    steps = {step for chosen in reasons.values() for step in chosen}
    return {step: tuple(reason for reason, chosen in reasons.items() if step in chosen) for step in sorted(steps)}


def _outlived(commits: Mapping[int, _Commit], kept: Mapping[int, object], *, since: float) -> set[int]:
    """Damaged commits older than ``since`` and than one that is whole: nobody will look at them any more."""
    return {
        step
        for step, commit in commits.items()
        if commit.problem and not commit.foreign and commit.item.modified < since and kept and step < max(kept)
    }


def _of_kept(objects: list[StoredObject], attempt: str, spared: set[str], ages: _Ages) -> list[StoredObject]:
    """Of the folder of a commit that stays: attempts that lost against it, temporary files, and evidence whose time is over."""
    others = [item for item in objects if not _is_beside(item) or _SET_ASIDE.fullmatch(_name(item)) or _is_temporary(item)]
    return _abandoned(others, {*spared, attempt}, ages)


def _of_doomed(objects: list[StoredObject], attempt: str, spared: set[str], ages: _Ages) -> list[StoredObject]:
    """Of the folder of a commit that goes: what belongs to it now (its COMMIT goes before), and the rest in its time."""
    own: list[StoredObject] = []
    others: list[StoredObject] = []
    for item in objects:
        is_own = _name(item) == attempt or (_is_beside(item) and not _SET_ASIDE.fullmatch(_name(item)))
        (own if is_own else others).append(item)
    return [*(item for item in own if _name(item) != COMMIT), *_abandoned(others, spared, ages)]


def _abandoned(objects: list[StoredObject], spared: set[str], ages: _Ages) -> list[StoredObject]:
    """Attempts that have been silent for long, but for what is evidence: what was set aside, with all that was there then."""
    moments = [item.modified for item in objects if _SET_ASIDE.fullmatch(_name(item)) and item.modified >= ages.evidence]
    evidence_until = max(moments, default=-math.inf)
    attempts: dict[str, list[StoredObject]] = {}
    for item in objects:
        attempts.setdefault(_name(item), []).append(item)
    return [
        item
        for name, items in attempts.items()
        if name not in spared and max(each.modified for each in items) < ages.abandoned
        for item in items
        if item.modified > evidence_until
    ]


def _is_temporary(item: StoredObject) -> bool:
    """Whether it is what a process that died left of a write to a directory."""
    return item.key.endswith(".partial")


def _is_beside(item: StoredObject) -> bool:
    """Whether it lies beside the COMMIT, and not in an attempt's folder."""
    return item.key.count("/") == 1


def _name(item: StoredObject) -> str:
    """Of the attempt, or of the object itself beside them."""
    return item.key.split("/")[1]


def _by_step(objects: Iterable[StoredObject]) -> dict[int, list[StoredObject]]:
    steps: dict[int, list[StoredObject]] = {}
    for item in objects:
        step = step_of(item.key)
        if step is not None:
            steps.setdefault(step, []).append(item)
    return steps
