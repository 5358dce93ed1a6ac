"""Settings of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainrun.config import ConfigError

LONGEST_TIMEOUT = 365 * 24 * 3600.0
"""Seconds; PyTorch's own timeouts overflow somewhere beyond."""

PUBLISHED_FAILURES_PER_NODE_DAY = 0.004
"""419 unexpected interruptions in 54 days on 2,048 nodes of 8 GPUs make 0.0038 ("The Llama 3 Herd of Models", 2024, section
3.3.4, arXiv:2407.21783)."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When checkpoints are written, how long that may take, and which are kept. See docs/checkpoints.md."""

    location: str = ""
    """URL or directory under which runs are kept. A node takes it from the RunSpec; empty elsewhere means none."""
    every_steps: int | Literal["auto"] = 100
    """Steps between two saves. "auto" chooses them so that saving and the work that a failure costs are least together, from what
    a save was measured to cost and from failures_per_node_day (Young and Daly), and says so; its first save is after 10 steps."""
    failures_per_node_day: float = PUBLISHED_FAILURES_PER_NODE_DAY
    """How often a node fails, for every_steps "auto". The default is that of a large training on reserved nodes (Llama 3: 419
    interruptions in 54 days on 2,048 nodes). Spot capacity is taken away more often: say what you see there, such as 0.1."""
    keep: int = 3
    """Newest commits kept, at least 2: one to restore and one to fall back on."""
    keep_every_steps: int = 0
    """Also keep, for good, the first commit at or after each multiple of so many steps; 0 keeps none for its step."""
    keep_best: int = 0
    """Also keep so many commits with the best metric of those given to state.save(metric=...); 0 keeps none for its metric."""
    best: Literal["lowest", "highest"] = "lowest"
    """Which metric is best, for keep_best: the lowest (a loss) or the highest (an accuracy)."""
    most_failures: int = 3
    """Saves that may fail in a row; the last of them ends the run, with its reason."""
    timeout_seconds: float = 300.0
    """How long one save may take, from its snapshot until every rank's shard is in the store; then it has failed."""
    stop_seconds: float = 30.0
    """How long the ranks have from a SIGTERM, or a stop file without a number, until they are killed: the last save has to end by
    then. A node takes it from timeouts.stop_grace of the RunSpec. 30 is what torchrun and Kubernetes give."""

    def __post_init__(self) -> None:
        problems = [*self._out_of_range(), *self._ignored()]
        if problems:
            raise ConfigError(problems)

    def _out_of_range(self) -> Iterator[str]:
        if self.every_steps != "auto" and self.every_steps < 1:
            yield f'every_steps is {self.every_steps}. Allowed: 1 or more, or "auto".'
        if not 0 < self.failures_per_node_day <= 24 * 60:
            yield f"failures_per_node_day is {self.failures_per_node_day}. Allowed: more than 0, at most 1440 (one a minute)."
        if self.keep < 2:
            yield f"keep is {self.keep}. Allowed: 2 or more, so that a damaged checkpoint has one before it to fall back on."
        for name in ("keep_every_steps", "keep_best"):
            if getattr(self, name) < 0:
                yield f"{name} is {getattr(self, name)}. Allowed: 0 (none) or more."
        if self.most_failures < 1:
            yield f"most_failures is {self.most_failures}. Allowed: 1 (the first failed save ends the run) or more."
        for name in ("timeout_seconds", "stop_seconds"):
            if not 0 < getattr(self, name) <= LONGEST_TIMEOUT:
                yield f"{name} is {getattr(self, name)}. Allowed: more than 0, at most {LONGEST_TIMEOUT:.0f} (a year)."

    def _ignored(self) -> Iterator[str]:
        """Settings that another one leaves without a meaning."""
        if self.every_steps != "auto" and self.failures_per_node_day != PUBLISHED_FAILURES_PER_NODE_DAY:
            yield (
                f"failures_per_node_day is {self.failures_per_node_day}, but every_steps is {self.every_steps}, which does not "
                'look at it. Remove it, or set every_steps to "auto".'
            )
        if self.every_steps != "auto" and 0 < self.keep_every_steps <= self.every_steps:
            yield (
                f"keep_every_steps is {self.keep_every_steps} and every_steps {self.every_steps}: every checkpoint would be "
                f"kept, and keep ({self.keep}) would mean nothing. Set keep_every_steps to more than every_steps; to keep all "
                "checkpoints, set it to 0 and keep to more than there will be."
            )
        if self.keep_best == 0 and self.best != "lowest":
            yield f'best is "{self.best}", but keep_best is 0: nothing is kept for its metric. Set keep_best, or remove best.'
