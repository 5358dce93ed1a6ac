"""summary.json: what became of a run, for people and for what they build on it.

Everything in it is read from the run's folder, so that whichever node ends the run, the summary is of all nodes.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from trainrun import goodput
from trainrun.checkpoint.layout import commit_key, committed_steps, step_directory
from trainrun.checkpoint.listing import list_checkpoints
from trainrun.node.result import End
from trainrun.parallel import in_threads
from trainrun.store import Store, StoreError

KEY = "summary.json"
LAST_LINES = 30
THREADS = 8

CAUSES = {
    "hang": r"made no progress",
    "loss of the rendezvous host": r"rendezvous host",
    "a node that left": r"saved and left",
    "crash": r"ended with exit code",
}
"""Why a launch is started anew, by what the event of its end says; the first that matches."""

log = logging.getLogger(__name__)

Line = Mapping[str, Any]


def summarize(store: Store, end: End, *, run: str) -> dict[str, Any]:
    """The summary of a run's last start.

    Args:
        store: the run's folder.
        end: how it ended.
        run: its name.

    Returns:
        What JSON takes. What cannot be read is left out; the log says why.
    """
    summary: dict[str, Any] = {
        "run": run,
        "location": store.url,
        "state": end.state,
        "reason": end.reason,
        "ended": end.time,
        "told_by": end.node,
        "step": end.step,
        "steps": end.steps,
    }
    for part in (_of_metrics, _of_events, _of_checkpoints, _of_failures, _of_time):
        try:
            summary |= part(store, end)
        except (StoreError, ValueError, KeyError, TypeError) as error:
            log.warning("The summary lacks a part (%s): %s", part.__name__.removeprefix("_of_"), error)
    return summary


def _of_metrics(store: Store, end: End) -> dict[str, Any]:
    """Tokens and loss of the last step that was logged."""
    for stored in sorted(store.list("metrics/"), key=lambda one: one.modified, reverse=True):
        steps = [line for line in _lines(store.get(stored.key)) if "loss" in line or "tokens" in line]
        if steps:
            return {name: steps[-1][name] for name in ("tokens", "loss", "tokens_per_second") if name in steps[-1]}
    return {}


def _of_events(store: Store, end: End) -> dict[str, Any]:
    """Wall time, the nodes that took part, restarts by cause, and the last words of the rank that failed."""
    found: dict[str, bytes] = {}
    keys = [stored.key for stored in store.list("nodes/") if stored.key.endswith(".jsonl")]
    in_threads([partial(_read_into, found, store, key) for key in keys], THREADS)
    since = _ended_before(store, end)
    lines = [line for data in found.values() for line in _lines(data) if since < line["time"] <= end.time + 60.0]
    nodes: dict[str, dict[str, Any]] = {}
    for line in sorted(lines, key=lambda line: float(line["time"])):
        node = nodes.setdefault(line["node"], {"node": line["node"], "address": line["address"], "from": line["time"]})
        node |= {"until": line["time"], "last_step": line["step"], "last_state": line["state"]}
    failed = [line for line in lines if (line["step"], line["state"]) == ("train", "failed")]
    first = min((float(line["time"]) for line in lines), default=end.time)
    last = max(failed, key=lambda line: float(line["time"]), default=None)
    text = end.reason if last is None else str(last["detail"])
    return {
        "wall_seconds": round(max(0.0, end.time - first), 3),
        "nodes": list(nodes.values()),
        "restarts": dict(Counter(cause_of(line["detail"]) for line in failed)),
        "last_lines": text.splitlines()[-LAST_LINES:] if end.state == "failed" else [],
    }


def cause_of(detail: str) -> str:
    """Why a launch ended, in one or two words."""
    return next((cause for cause, pattern in CAUSES.items() if re.search(pattern, detail)), "other")


def _of_checkpoints(store: Store, _: End) -> dict[str, Any]:
    """The last checkpoint whose COMMIT and shards are there."""
    for step in reversed(committed_steps(store)):
        for one in list_checkpoints(store, step):
            if one.status == "committed" and one.commit is not None:
                return {
                    "checkpoint": {
                        "step": step,
                        "url": store.locate(step_directory(step)),
                        "commit": store.locate(commit_key(step)),
                        "time": one.time,
                        "bytes": one.bytes,
                        "tokens": one.commit.tokens,
                    }
                }
    return {"checkpoint": None}


def _of_failures(store: Store, end: End) -> dict[str, Any]:
    """Where stack dumps and reasons of replacements are."""
    since = _ended_before(store, end)
    return {
        name: [store.locate(one.key) for one in store.list(f"{name}/") if one.modified > since]
        for name in ("failures", "replacements")
    }


def _of_time(store: Store, _: End) -> dict[str, Any]:
    """Where the time went: goodput, and each loss by its cause."""
    found = goodput.of(store)
    return {"goodput": None if found is None else found.to_mapping()}


def _ended_before(store: Store, end: End) -> float:
    """When the run ended the last time before this, in seconds since the epoch; 0 when it had not."""
    if end.number <= 1:
        return 0.0
    return float(json.loads(store.get(f"ends/{end.number - 1:06}.json"))["time"])


def _read_into(found: dict[str, bytes], store: Store, key: str) -> None:
    found[key] = store.get(key)


def _lines(data: bytes) -> Iterable[Line]:
    for line in data.splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # the line that is being written
            continue
