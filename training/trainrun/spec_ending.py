"""The parts of the RunSpec that say how a run ends, and to whom a node says that it is ready.

Standard library only (`trainrun.spec`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainrun.config import ConfigError

ReadinessWay = Literal["none", "signal", "wait_condition"]


@dataclass(frozen=True, kw_only=True)
class ShutdownSpec:
    """What happens when the job ends."""

    on_success: Literal["scale_to_zero", "keep"] = "scale_to_zero"
    on_failure: Literal["scale_to_zero", "keep"] = "keep"
    keep_minutes: int | None = 120
    """For how long "keep" keeps the nodes before the group is scaled to zero after all; None means until somebody ends them."""
    max_restarts: int = 20
    """Restarts of the job on one node before the node reports the run as failed."""
    same_failures: int = 2
    """Failures in a row, by the same error at the same step, after which the run has failed: another try would fail likewise."""
    max_replacements: int = 5
    """Nodes of the run, in 24 hours, that are replaced because they did not pass their checks; the next such ends the run."""

    def __post_init__(self) -> None:
        problems = []
        if self.max_restarts < 0:
            problems.append(f"max_restarts is {self.max_restarts}. Allowed: 0 or more.")
        if self.max_replacements < 0:
            problems.append(f"max_replacements is {self.max_replacements}. Allowed: 0 or more.")
        if self.same_failures < 2:
            problems.append(f"same_failures is {self.same_failures}. Allowed: 2 or more; max_restarts of 0 starts nothing anew.")
        if self.keep_minutes is not None and self.keep_minutes < 1:
            problems.append(
                f"keep_minutes is {self.keep_minutes}. Allowed: 1 or more, or null, which keeps the nodes until somebody ends "
                "them. 'scale_to_zero' keeps none."
            )
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True, kw_only=True)
class ReadinessSpec:
    """How a node tells CloudFormation that its checks have passed, or have not."""

    way: ReadinessWay = "none"
    """"signal" calls cloudformation:SignalResource, "wait_condition" sends an HTTP request to a wait condition's handle."""
    stack: str = ""
    """For "signal": the stack, by name or id."""
    resource: str = ""
    """For "signal": logical id of the Auto Scaling group in it."""
    url: str = ""
    """For "wait_condition": the handle's presigned URL. Whoever knows it can send signals, and nothing else."""

    def __post_init__(self) -> None:
        wanted = {"none": (), "signal": ("stack", "resource"), "wait_condition": ("url",)}[self.way]
        given = [name for name in ("stack", "resource", "url") if getattr(self, name)]
        if list(wanted) != given:
            problem = f"way is {self.way!r}, which takes {' and '.join(wanted) or 'nothing else'}, and has {given or 'nothing'}."
            raise ConfigError([problem])
