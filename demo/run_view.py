"""What a laptop can know of a run: everything is read from the run's own folder in the bucket."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from trainrun.store import Store, StoreKeyMissing, open_store

Line = dict[str, Any]


@dataclass
class RunView:
    """The newest state of the run at `location`; call `refresh` to read what is new."""

    location: str
    steps: list[Line] = field(default_factory=list)
    """Metric lines in order of time: one a step, with loss and tokens per second."""
    events: list[Line] = field(default_factory=list)
    """What rank 0 reported beside the steps: started, resumed, committed, finished."""
    nodes: dict[str, Line] = field(default_factory=dict)
    """The newest event of each node's agent, by instance id."""
    result: Line | None = None
    rank0: str = ""
    """Instance id of the node whose rank 0 wrote the newest metric line."""

    def __post_init__(self) -> None:
        self._store: Store = open_store(self.location)
        self._sizes: dict[str, int] = {}
        self._lines: dict[str, list[Line]] = {}

    def refresh(self) -> None:
        for stored in self._store.list():
            if stored.key.endswith(".jsonl") and self._sizes.get(stored.key) != stored.size:
                self._sizes[stored.key] = stored.size
                self._lines[stored.key] = parse_lines(self._store.get(stored.key))
        metrics = [(key, line) for key, lines in self._lines.items() if key.startswith("metrics/") for line in lines]
        metrics.sort(key=lambda pair: pair[1]["time"])
        self.steps = [line for _, line in metrics if "loss" in line]
        self.events = [line for _, line in metrics if "event" in line]
        self.nodes = {lines[-1]["node"]: lines[-1] for key, lines in self._lines.items() if key.startswith("nodes/") and lines}
        if metrics:
            self.rank0 = metrics[-1][0].removeprefix("metrics/").rsplit("-", 2)[0]
        try:
            self.result = json.loads(self._store.get("result.json"))
        except StoreKeyMissing:
            self.result = None

    @property
    def step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def commits(self) -> list[int]:
        """Steps of the checkpoints committed so far."""
        return sorted({int(event["step"]) for event in self.events if event["event"] == "committed"})

    def loss_curve(self) -> list[tuple[int, float]]:
        """(step, loss) of every step that counts: of a step run twice, the run that was built on."""
        return sorted({int(line["step"]): float(line["loss"]) for line in self.steps}.items())

    def resumptions(self, *, after: float) -> list[Line]:
        """The times training went on from a commit since `after`, each with the steps that had to be done again."""
        found = []
        since = 0.0
        for event in self.events:
            if event["event"] != "resumed":
                continue
            if event["time"] > after:
                done = [int(line["step"]) for line in self.steps if since <= line["time"] <= event["time"]]
                found.append({**event, "steps_lost": max(0, max(done, default=0) - int(event["step"]))})
            since = event["time"]
        return found


def parse_lines(data: bytes) -> list[Line]:
    """The JSON lines of `data`; a last line that is still being written is left for the next look."""
    lines = []
    for text in data.decode().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
