"""Runs checks, as many at once as may be, and keeps account of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainrun.node.outcome import StepFailed

LONGEST_SECONDS = 400.0
"""For all checks together. Each has its own, shorter bound, but for what hangs in the kernel, such as a mount."""


@dataclass(frozen=True)
class Check:
    """One thing to look at."""

    name: str
    look: Callable[[], str]
    """Returns what was found; raises StepFailed with what was seen, what was expected and what to do."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What came of a check."""

    name: str
    seconds: float
    found: str = ""
    fault: str = ""
    """Empty when all is well."""

    def __str__(self) -> str:
        return f"{self.name} {self.seconds:.2f} s: {self.fault or self.found}"


class ChecksFailed(StepFailed):
    """Some checks failed; the text has all of them, one after the other.

    Attributes:
        results: of all checks.
    """

    def __init__(self, results: Sequence[Checked]) -> None:
        super().__init__("\n".join(f"{one.name}: {one.fault}" for one in results if one.fault))
        self.results = results

    @property
    def names(self) -> list[str]:
        """Of the checks that failed."""
        return [one.name for one in self.results if one.fault]


def run_checks(checks: Sequence[Check], *, longest: float = LONGEST_SECONDS) -> list[Checked]:
    """Run checks at once, each in a thread of its own. Returns their results in the same order; none keeps another from running.

    Args:
        checks: independent ones.
        longest: seconds after which one that has not ended counts as failed.
    """
    results: dict[str, Checked] = {}
    started = time.monotonic()
    threads = [threading.Thread(target=_run, args=(one, results), name=one.name, daemon=True) for one in checks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, started + longest - time.monotonic()))
    hung = f"It has not ended after {longest:g} s. What it looks at does not answer; see the agent's log and dmesg."
    return [results.get(one.name) or Checked(name=one.name, seconds=longest, fault=hung) for one in checks]


def _run(check: Check, results: dict[str, Checked]) -> None:
    started = time.monotonic()
    found = fault = ""
    try:
        found = check.look()
    except StepFailed as failure:
        fault = str(failure)
    except Exception as error:  # a fault of the check's own must not pass for a sound node, nor hide the others' findings
        fault = f"The check itself failed: {type(error).__name__}: {error}"
    results[check.name] = Checked(name=check.name, seconds=time.monotonic() - started, found=found, fault=fault)
