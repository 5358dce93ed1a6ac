"""What is deleted, and in which order: COMMIT first, so that nothing is ever found half gone."""

from __future__ import annotations

from collections.abc import Iterable

from trainrun.checkpoint.layout import COMMIT, commit_key, committed_steps, read_commit, step_directory
from trainrun.store import Store, StoredObject


def keep_newest(store: Store, keep: int, *, abandoned_after_seconds: float) -> None:
    """Keep the newest ``keep`` commits, by step; delete older ones, and what no commit will ever name.

    Shards without a commit may be a checkpoint that is just being written, by whomever. They are left alone until
    nothing was added to them for ``abandoned_after_seconds``, by the store's own clock.

    Raises:
        StoreError: something could not be read or deleted; the next call goes on.
    """
    steps = committed_steps(store)
    for step in steps[:-keep]:
        store.delete([commit_key(step)])
        store.delete([item.key for item in store.list(f"{step_directory(step)}/")])
    store.delete(_abandoned(store, steps[-keep:], abandoned_after_seconds))


def _abandoned(store: Store, kept: Iterable[int], after_seconds: float) -> list[str]:
    """Keys of attempts that no kept commit names and that have been silent for long."""
    named = {f"{step_directory(step)}/{read_commit(store, step).attempt}" for step in kept}
    objects = list(store.list("step-"))
    attempts: dict[str, list[StoredObject]] = {}
    for item in objects:
        if item.key.rpartition("/")[2] != COMMIT:
            attempts.setdefault("/".join(item.key.split("/")[:2]), []).append(item)
    now = max((item.modified for item in objects), default=0.0)
    return [
        item.key
        for attempt, items in attempts.items()
        if attempt not in named and max(item.modified for item in items) < now - after_seconds
        for item in items
    ]
