"""How long a node takes from the first instruction of its user data to its first training step, part by part.

Read from the run's folder: what the node's agent reported step by step (``nodes/``), and the metric lines of the launch that
followed (``metrics/``). EC2's own part, from the request to the first instruction, is not in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainrun.store import Store

PARTS = ("bootstrap", "prepare", "software", "check", "ready", "meet")
"""Steps of the agent, and before them the user data's, in order."""


@dataclass(frozen=True, kw_only=True)
class Boot:
    """One node's way to its first training step, in seconds."""

    node: str
    parts: dict[str, float]
    """Of `PARTS` those that it reported; "start" is from the launch to the ranks' start (torchrun, the rendezvous, imports,
    the model), "resume" from there to the first step (a checkpoint, the data, the first compilation)."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.parts.values())


def boots(store: Store) -> list[Boot]:
    """All nodes that came to a training step, in the order of their first report.

    Raises:
        StoreError: the store did not answer.
    """
    nodes = [lines for key in _keys(store, "nodes/") if (lines := _lines(store.get(key)))]
    metrics = [line for key in _keys(store, "metrics/") for line in _lines(store.get(key))]
    metrics.sort(key=_time)
    found = (_boot(lines, metrics) for lines in sorted(nodes, key=lambda lines: _time(lines[0])))
    return [boot for boot in found if boot is not None]


def _boot(lines: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> Boot | None:
    launched = next((_time(line) for line in lines if (line["step"], line["state"]) == ("train", "started")), None)
    if launched is None:
        return None
    parts = {}
    for name in PARTS:
        done = [line for line in lines if (line["step"], line["state"]) == (name, "done") and line["time"] <= launched + 0.001]
        if done:
            parts[name] = float(done[-1]["seconds"])
    after = [line for line in metrics if line["time"] > launched]
    started = next((_time(line) for line in after if line.get("event") == "started"), None)
    if started is None:
        return None
    step = next((_time(line) for line in after if "event" not in line and line["time"] > started), None)
    if step is None:
        return None
    return Boot(node=str(lines[0]["node"]), parts={**parts, "start": started - launched, "resume": step - started})


def _time(line: dict[str, Any]) -> float:
    return float(line["time"])


def _keys(store: Store, folder: str) -> list[str]:
    return [item.key for item in store.list(folder) if item.key.endswith(".jsonl")]


def _lines(data: bytes) -> list[dict[str, Any]]:
    return list(_whole(data.splitlines()))


def _whole(texts: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    for text in texts:
        try:
            yield json.loads(text)
        except ValueError:  # the line that is being written
            continue
