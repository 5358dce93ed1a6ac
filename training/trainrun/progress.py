"""How far each rank of this machine is, for whoever looks after it: a small file per rank that is written without a system call.

The node agent reads these files to find ranks that hang or are slow. A loop of one's own takes part by
``trainrun.progress.note(step)`` once a step; one that never does is not looked at.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Phase = Literal["starting", "training", "between", "ended"]
"""What a rank does: it begins (restores, compiles, takes its first step), takes steps, does something beside them that may
take long (an evaluation, the last save), or has come to its end."""

FOLDER = "progress"
"""Below ``$TRAINRUN_STATE``; one file a rank, named by the rank."""

_PHASES: tuple[Phase, ...] = get_args(Phase)
_RECORD = struct.Struct("<4sIqqqdd")
_MAGIC = b"TRP1"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One rank, at one moment."""

    rank: int
    pid: int
    phase: Phase
    step: int
    """Steps that it has taken, of the whole run."""
    arrived: int
    """The last step at which it has come to where ranks wait for each other: ahead of ``step`` while it waits there."""
    time: float
    """Seconds since the epoch at which it last wrote."""
    own_seconds: float
    """Of the last step, the time until it came to where ranks wait for each other; 0 when unknown."""


class ProgressFile:
    """What one rank writes. Each write is a few stores into mapped memory."""

    def __init__(self, state: Path, rank: int) -> None:
        """Args:
        state: ``$TRAINRUN_STATE``.
        rank: this process's number in the run.
        """
        folder = state / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f".{rank}.{os.getpid()}"
        new.write_bytes(bytes(_RECORD.size))
        with new.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _RECORD.size)
        self._pid = os.getpid()
        self._arrived = 0
        self.write("starting", step=0)
        new.replace(folder / str(rank))  # so that a reader sees records of one process, and whole ones

    def write(self, phase: Phase, *, step: int, own_seconds: float = 0.0, arrived: int | None = None) -> None:
        """Tell where this rank is."""
        self._arrived = step if arrived is None else arrived
        _RECORD.pack_into(self._memory, 0, _MAGIC, _PHASES.index(phase), self._pid, step, self._arrived, time.time(), own_seconds)


_mine: ProgressFile | None = None


def note(step: int, *, own_seconds: float = 0.0) -> None:
    """Tell the node agent, from a loop that is not trainrun's, that this rank has taken a step. Costs microseconds.

    Args:
        step: how many steps the run has taken.
        own_seconds: of this step, the time before this rank waited for others; 0 when that is not known.
    """
    global _mine
    state = os.environ.get("TRAINRUN_STATE")
    if not state:
        return
    if _mine is None:
        _mine = ProgressFile(Path(state), int(os.environ.get("RANK", "0")))
    _mine.write("training", step=step, own_seconds=own_seconds)


def read(state: Path) -> list[Progress]:
    """What the ranks of this machine last wrote, in the order of their numbers; files that are no records are left out."""
    return sorted(_records(state / FOLDER), key=lambda progress: progress.rank)


def clear(state: Path) -> None:
    """Forget the ranks of launches that are over."""
    for file in (state / FOLDER).glob("*"):
        file.unlink(missing_ok=True)


def _records(folder: Path) -> Iterator[Progress]:
    for file in folder.glob("[0-9]*"):
        try:
            magic, phase, pid, step, arrived, now, own = _RECORD.unpack(file.read_bytes())
        except (OSError, struct.error):
            continue
        if magic == _MAGIC and phase < len(_PHASES):
            yield Progress(
                rank=int(file.name), pid=pid, phase=_PHASES[phase], step=step, arrived=arrived, time=now, own_seconds=own
            )
