"""One run of torchrun: start it, stop it, and say why it ended."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainrun.node.places import Places
from trainrun.node.processes import kill_descendants

EXPLAINING_LINES = 12
TAIL_BYTES = 16384


class Launch:
    """A running torchrun with its ranks. Use as a context manager: leaving it leaves no process behind."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], places: Places) -> None:
        self._places = places
        self._log_start = places.torchrun_log.stat().st_size if places.torchrun_log.exists() else 0
        with places.torchrun_log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=places.project if places.project.is_dir() else places.state,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a signal to the agent's group is the agent's to forward
            )

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        kill_descendants(os.getpid())  # ranks whose torchrun died are the agent's own children by now

    def exit_code(self) -> int | None:
        """torchrun's exit code; None while it runs."""
        return self._process.poll()

    def stop(self, *, grace: float) -> None:
        """Ask torchrun to end its ranks, which may save and leave, and kill whatever is left after ``grace`` seconds."""
        self._process.terminate()
        try:
            self._process.wait(timeout=grace)
        except subprocess.TimeoutExpired:
            kill_descendants(self._process.pid)
            self._process.kill()
            self._process.wait()

    def rank_exit_codes(self) -> list[int]:
        """Exit codes of the ranks that failed on this node, as torchrun reported them; negative ones are signals."""
        return [int(code) for code in re.findall(r"^\s*exitcode\s*:\s*(-?\d+)", self._said(), flags=re.MULTILINE)]

    def explanation(self) -> str:
        """The last lines of the rank that failed here, or of torchrun when no rank did."""
        failed = re.search(r"Root Cause.*?local_rank:\s*(\d+)", self._said(), flags=re.DOTALL)
        if not failed:
            return _last_lines(_without_frames(self._said()))
        logs = self._places.rank_logs.glob(f"*/attempt_*/{failed.group(1)}/stderr.log")
        newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
        text = _tail(newest).strip() if newest else ""
        return _last_lines(text) or "No error output. (A negative code is a signal; the kernel sends -9 when memory runs out.)"

    def _said(self) -> str:
        """What torchrun said since this launch."""
        return _tail(self._places.torchrun_log, start=self._log_start)


def _tail(path: Path, *, start: int = 0) -> str:
    with path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")


def _without_frames(text: str) -> str:
    """The text less the stack frames of Python and C++: torchrun's own are of no use to its users."""
    return "\n".join(line for line in text.splitlines() if not line.startswith((" ", "frame #", "<omitting")))


def _last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-EXPLAINING_LINES:])
