"""The ranks of this node under mpirun, as the agent sees them: by the files that `mpi_rank` writes."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from trainrun.node.launch import last_lines, tail
from trainrun.node.outcome import ASKED_TO_STOP


class MpiRanks:
    """The ranks of one launch on this node."""

    def __init__(self, *, folder: Path, count: int) -> None:
        """Args:
        folder: where the ranks' folders are.
        count: how many ranks there are to be.
        """
        self.folder = folder
        self._count = count
        self._asked: set[int] = set()

    def ask_to_stop(self) -> None:
        """SIGTERM to each rank that has not had one. To be called again and again: ranks may yet come."""
        for path in self.folder.glob("*/pid"):
            pid = int(path.read_text())
            if pid not in self._asked and not (path.parent / "exit_code").exists():
                self._asked.add(pid)
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGTERM)

    def have_started(self) -> bool:
        """Whether any has."""
        return any(self.folder.glob("*/pid"))

    def exit_codes(self) -> list[int]:
        """Exit codes of the ranks that came to an end of their own; negative ones are signals."""
        return [int(path.read_text()) for path in self._ends()]

    def all_ended(self) -> bool:
        """Whether no rank was killed before it could say how it ended."""
        return len(self._ends()) == self._count

    def explanation(self) -> str:
        """The last lines of the first rank that failed here by itself, or ""."""
        ends = {path: int(path.read_text()) for path in self._ends()}
        others = (0, ASKED_TO_STOP, -signal.SIGTERM)  # Open MPI sends SIGTERM to those that are left when one has failed
        failed = [path for path, code in ends.items() if code not in others]
        if not failed:
            return ""
        first = min(failed, key=lambda path: path.stat().st_mtime)
        said = last_lines(tail(first.parent / "stderr.log")) or last_lines(tail(first.parent / "stdout.log"))
        return said or "No output. (A negative code is a signal; the kernel sends -9 when memory runs out.)"

    def _ends(self) -> list[Path]:
        return list(self.folder.glob("*/exit_code"))
