"""One run of the launcher: start it, stop it, and say why it ended. torchrun's is here, mpirun's in `mpi_launch`."""

from __future__ import annotations

import abc
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainrun.node.places import Places
from trainrun.node.processes import kill_descendants, ranks_below
from trainrun.node.software import Software

EXPLAINING_LINES = 12
TAIL_BYTES = 16384


class Launch(abc.ABC):
    """A running launcher with its ranks. Use as a context manager: leaving it leaves no process behind."""

    name: str
    """The launcher's, for messages."""
    reason: str = ""
    """Why the nodes must meet anew, where the launch itself has found that."""

    @abc.abstractmethod
    def __enter__(self) -> Launch: ...

    @abc.abstractmethod
    def __exit__(self, *_: object) -> None: ...

    @abc.abstractmethod
    def exit_code(self) -> int | None:
        """The launcher's exit code; None while it runs."""

    @abc.abstractmethod
    def stop(self, *, grace: float) -> None:
        """Ask the ranks to end, which may save and leave, and kill whatever is left after ``grace`` seconds."""

    def signal_ranks(self, number: signal.Signals) -> None:
        """Send each rank of this node a signal; not what the ranks themselves have started."""
        for rank in ranks_below(os.getpid(), *self._processes()):
            with suppress(ProcessLookupError):
                os.kill(rank, number)

    def _processes(self) -> list[int]:
        """Processes of the launch that are no children of the agent's; theirs are not among them."""
        return []

    @abc.abstractmethod
    def rank_exit_codes(self) -> list[int]:
        """Exit codes of the ranks that failed on this node; negative ones are signals."""

    @abc.abstractmethod
    def explanation(self) -> str:
        """The last lines of the rank that failed here, or of the launcher when no rank did."""


def start(command: Sequence[str], *, environment: Mapping[str, str], places: Places, log: Path) -> subprocess.Popen[bytes]:
    """Start a launcher in the project's folder; what it says is appended to ``log``."""
    with log.open("ab") as said:
        return subprocess.Popen(
            command,
            env=dict(environment),
            cwd=working_directory(places),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,  # a signal to the agent's group is the agent's to forward
        )


def working_directory(places: Places) -> Path:
    """Where the ranks run."""
    return places.project if places.project.is_dir() else places.state


def size_of(log: Path) -> int:
    """Where what is said from now on begins."""
    return log.stat().st_size if log.exists() else 0


class TorchrunLaunch(Launch):
    """A running torchrun."""

    name = "torchrun"

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], places: Places, software: Software | None = None
    ) -> None:
        """Args:
        command: torchrun's, as its software knows it.
        environment: of it and its ranks.
        places: where things are on this node.
        software: what it is run with; None is nothing besides the node's own.
        """
        self._places = places
        self._software = software or Software("")
        command = self._software.command(command, environment)
        self._log_start = size_of(places.torchrun_log)
        self._process = start(command, environment=environment, places=places, log=places.torchrun_log)

    def __enter__(self) -> TorchrunLaunch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._software.clear()
        kill_descendants(os.getpid())  # ranks whose torchrun died are the agent's own children by now

    def exit_code(self) -> int | None:
        return self._process.poll()

    def stop(self, *, grace: float) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=grace)
        except subprocess.TimeoutExpired:
            self._software.clear()
            kill_descendants(self._process.pid)
            self._process.kill()
            self._process.wait()

    def _processes(self) -> list[int]:
        return self._software.processes()

    def rank_exit_codes(self) -> list[int]:
        """As torchrun reported them."""
        return [int(code) for code in re.findall(r"^\s*exitcode\s*:\s*(-?\d+)", self._said(), flags=re.MULTILINE)]

    def explanation(self) -> str:
        failed = re.search(r"Root Cause.*?local_rank:\s*(\d+)", self._said(), flags=re.DOTALL)
        if not failed:
            return last_lines(_without_frames(self._said()))
        logs = self._places.rank_logs.glob(f"*/attempt_*/{failed.group(1)}/stderr.log")
        newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
        text = tail(newest).strip() if newest else ""
        return last_lines(text) or "No error output. (A negative code is a signal; the kernel sends -9 when memory runs out.)"

    def _said(self) -> str:
        """What torchrun said since this launch."""
        return tail(self._places.torchrun_log, start=self._log_start)


def tail(path: Path, *, start: int = 0) -> str:
    """The end of a file, but nothing before the byte ``start``."""
    with path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")


def _without_frames(text: str) -> str:
    """The text less the stack frames of Python and C++: torchrun's own are of no use to its users."""
    return "\n".join(line for line in text.splitlines() if not line.startswith((" ", "frame #", "<omitting")))


def last_lines(text: str) -> str:
    """As many as explain a failure."""
    return "\n".join(text.strip().splitlines()[-EXPLAINING_LINES:])
