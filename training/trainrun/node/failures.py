"""Whether a job fails again and again in the same way, so that starting it anew cannot help."""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from trainrun.last_error import LastError

OWN_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""By which a program ends itself. All others come from outside: a person, the kernel, the agent."""

OUTSIDE_KINDS = frozenset(
    {"StoreError", "CheckpointError", "BotoCoreError", "ClientError"}  # a store may fail for an hour
    | {"DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError", "TimeoutError"}
    | {"KeyboardInterrupt", "SystemExit"}
)
"""Kinds of errors that say nothing of the job itself, with all that derive from them."""

OUTSIDE_NUMBERS = frozenset({errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EHOSTUNREACH, errno.ENETUNREACH})
"""Errors of the operating system that come and go: of file systems that are served, disks, networks."""

PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|remote process|peer|socket|rendezvous|no route to host"
    r"|NCCL (error|watchdog)|ProcessGroupNCCL|DistBackendError|watchdog got stuck",
    re.IGNORECASE,
)
"""What gloo, NCCL and torch's stores say when another rank is gone: its error is the one to look at."""

_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)
_ERROR_LINE = re.compile(
    r"^\s*(?:\[rank\d+\]:\s*)?(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Fault))\b:?\s*(?P<message>.*)$"
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one launch failed on this node, as far as the job itself is to blame."""

    step: int
    """The step that was being taken; 0 when the ranks did not come that far, or do not tell."""
    error: str
    """Kind and message."""

    @property
    def signature(self) -> tuple[int, str]:
        """Equal for failures that are the same: numbers in the message (addresses, sizes, processes) do not count."""
        return self.step, _NUMBERS.sub("#", self.error)


def failure_of(
    *, step: int, errors: Sequence[LastError], codes: Sequence[int], explanation: str, killed_by_kernel: bool
) -> Failure | None:
    """What to hold against the job; None when the launch failed for something from outside, or because of another node.

    Args:
        step: that was being taken.
        errors: what ranks that use trainrun have written down, the first first.
        codes: exit codes of the ranks that failed here; negative ones are signals.
        explanation: the last lines of the rank that failed first here.
        killed_by_kernel: whether the kernel has killed a process for want of memory meanwhile.
    """
    if errors:
        first = errors[0]
        lost = "RuntimeError" in first.kinds and PEER_LOST.search(first.message)
        if OUTSIDE_KINDS & set(first.kinds) or first.number in OUTSIDE_NUMBERS or lost:
            return None
        return Failure(step=step, error=f"{first.kinds[0]}: {first.message}")
    if -signal.SIGKILL in codes and killed_by_kernel:
        return Failure(step=step, error="The kernel killed a process because memory ran out (exit code -9).")
    own = sorted(-code for code in codes if code < 0 and -code in OWN_SIGNALS)
    if own == [signal.SIGABRT] and PEER_LOST.search(explanation):
        return None  # NCCL's watchdog aborts those who are left
    if own:
        return Failure(step=step, error=f"A rank ended by {signal.Signals(own[0]).name}.")
    if not any(code > 0 for code in codes):
        return None
    lines = [line for line in explanation.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if _ERROR_LINE.match(line)), lines[-1] if lines else "")
    found = _ERROR_LINE.match(said)
    if PEER_LOST.search(said) or (found and found["kind"].rpartition(".")[2] in OUTSIDE_KINDS):
        return None
    return Failure(step=step, error=said.strip() or f"Exit codes {sorted(set(codes))}, and nothing was said.")


class Repetition:
    """Counts failures that are the same, one right after the other."""

    def __init__(self, *, allowed: int) -> None:
        """Args:
        allowed: so many failures that are the same end the run.
        """
        self._allowed = allowed
        self._last: Failure | None = None
        self._times = 0

    def note(self, failure: Failure | None) -> str:
        """Take note of a launch that failed. Returns why the run must not be tried again, or ""."""
        if failure is None:  # says nothing: the same failure may have been on its way
            return ""
        same = self._last is not None and failure.signature == self._last.signature
        self._times = self._times + 1 if same else 1
        self._last = failure
        if self._times < self._allowed:
            return ""
        where = f"at step {failure.step}" if failure.step else "before its first step was done"
        return (
            f"The job failed {self._times} times in the same way {where}, so that starting it again does not help "
            f"(shutdown.same_failures is {self._allowed}): {failure.error}"
        )
