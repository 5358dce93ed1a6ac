"""Sends the metric files that rank 0 writes on this node to the run's folder."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from trainrun.store import Store

FOLDER = "metrics"


class MetricFiles:
    """The metric files of this node. A file is sent whole whenever it has grown; they are rotated, so each is small."""

    def __init__(self, *, folder: Path, store: Store, node: str) -> None:
        self._folder = folder
        self._store = store.child(FOLDER)
        self._node = node
        self._sent: dict[str, int] = {}
        self._sending = threading.Lock()

    def send(self) -> None:
        """Send what has grown since it was last sent.

        Raises:
            StoreError: the store did not take it; the next call sends it again.
        """
        with self._sending:
            for path in sorted(self._folder.glob("*.jsonl")):
                data = path.read_bytes()
                if len(data) != self._sent.get(path.name):
                    self._store.put(f"{self._node}-{path.name}", data)
                    self._sent[path.name] = len(data)

    def last_step(self) -> tuple[int, int] | None:
        """The last step that was logged, of how many: from this node's files, else from those of all nodes.

        None when there is no such line, as with a job that writes no metrics.

        Raises:
            StoreError: the store did not answer.
        """
        for path in sorted(self._folder.glob("*.jsonl"), reverse=True):
            if found := _last_step_in(path.read_bytes()):
                return found
        for stored in sorted(self._store.list(), key=lambda stored: stored.modified, reverse=True):
            if found := _last_step_in(self._store.get(stored.key)):
                return found
        return None


def _last_step_in(data: bytes) -> tuple[int, int] | None:
    for line in reversed(data.splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:  # the line that is being written
            continue
        if "step" in entry and "steps" in entry:
            return entry["step"], entry["steps"]
    return None
