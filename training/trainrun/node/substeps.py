"""The sub-steps of a step: each timed, told with what it did and whether it changed anything, and named when it fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from trainrun.node.outcome import StepFailed


@dataclass(frozen=True)
class Done:
    """What a sub-step did."""

    detail: str
    changed: bool = False
    """Whether the node is another than before; on a second run nothing is."""


class SubSteps:
    """Runs sub-steps and keeps account of them."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: list[str] = []
        self._changed: list[str] = []

    def run(self, name: str, action: Callable[[], Done]) -> None:
        """Do one sub-step.

        Raises:
            StepFailed: as the action said, with the sub-step's name before it and what was done before it behind it.
        """
        started = self._clock()
        try:
            done = action()
        except StepFailed as failure:
            before = f"\nBefore it: {'; '.join(self._lines)}." if self._lines else ""
            raise StepFailed(f"{name} failed after {self._clock() - started:.2f} s: {failure}{before}") from None
        self._lines.append(f"{name} {self._clock() - started:.2f} s: {done.detail}")
        if done.changed:
            self._changed.append(name)

    def summary(self) -> str:
        """All in one line: "limits 0.01 s: ...; upgrades 0.31 s: .... Changed: limits." """
        changed = f"Changed: {', '.join(self._changed)}" if self._changed else "Nothing had to be changed"
        return f"{'; '.join(self._lines)}. {changed}."
