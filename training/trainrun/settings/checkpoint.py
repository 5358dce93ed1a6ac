"""Settings of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from trainrun.config import ConfigError

LONGEST_TIMEOUT = 365 * 24 * 3600.0
"""Seconds; PyTorch's own timeouts overflow somewhere beyond."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When checkpoints are written and how many are kept."""

    location: str = ""
    """URL or directory under which runs are kept. A node takes it from the RunSpec; empty elsewhere means none."""
    every_steps: int = 100
    keep: int = 3
    """Newest commits kept, at least 2: one to restore and one to fall back on."""
    timeout_seconds: float = 300.0
    """How long one rank may take to write its shard before the save counts as failed."""

    def __post_init__(self) -> None:
        problems = []
        if self.every_steps < 1:
            problems.append(f"every_steps is {self.every_steps}. Allowed: 1 or more.")
        if not 0 < self.timeout_seconds <= LONGEST_TIMEOUT:
            problems.append(
                f"timeout_seconds is {self.timeout_seconds}. Allowed: more than 0, at most {LONGEST_TIMEOUT:.0f} (a year)."
            )
        if self.keep < 2:
            problems.append(
                f"keep is {self.keep}. Allowed: 2 or more, so that a damaged checkpoint has one before it to fall back on."
            )
        if problems:
            raise ConfigError(problems)
