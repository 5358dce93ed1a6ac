"""What each rank of this node is doing, for people who ask why it hangs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainrun import stacks
from trainrun.node.processes import ranks_below

STACK_SECONDS = 3.0
"""For the ranks to write their stacks: a process that is stopped, or inside the kernel, writes none."""

STATES = {
    "T": "stopped by a signal (SIGSTOP, or a debugger)",
    "t": "stopped by a debugger",
    "D": "waiting inside the kernel, for a disk, a file system or a driver",
    "Z": "dead, and not taken note of",
}
"""States of a process that explain why it makes no progress (proc(5))."""
STOPPED = ("T", "t")
"""Those that last until somebody ends them."""


@dataclass(frozen=True, kw_only=True)
class Dump:
    """One rank's state and stacks."""

    rank: int
    pid: int
    state: str
    """The letter of proc(5); "?" where there is no /proc."""
    text: str

    @property
    def explains(self) -> str:
        """Why the process itself cannot go on, or "" when it could."""
        return STATES.get(self.state, "")


def dump_ranks(state: Path, *, besides: Sequence[int] = ()) -> list[Dump]:
    """State and stacks of all ranks below this process, in the order of their numbers. Takes up to `STACK_SECONDS`.

    Args:
        state: $TRAINRUN_STATE, where the ranks write their stacks.
        besides: other processes below which there are ranks.
    """
    ranks = {_rank_of(pid): pid for pid in ranks_below(os.getpid(), *besides)}
    before = {rank: _size(state / stacks.FOLDER / str(rank)) for rank in ranks}
    asked = {rank for rank, pid in ranks.items() if _tells(pid) and _ask(pid)}
    deadline = time.monotonic() + STACK_SECONDS
    while time.monotonic() < deadline and any(_size(state / stacks.FOLDER / str(rank)) == before[rank] for rank in asked):
        time.sleep(0.1)
    if asked:
        time.sleep(0.1)  # of several threads the last may still be written
    return [_dump(rank, pid, state / stacks.FOLDER / str(rank), before[rank]) for rank, pid in sorted(ranks.items())]


def state_of(pid: int) -> str:
    """The state of a process, by the letter of proc(5); "?" where there is no such process, or no /proc."""
    found = re.search(r"^State:\s+(\S)", _read(Path(f"/proc/{pid}/status")), flags=re.MULTILINE)
    return found.group(1) if found else "?"


def _dump(rank: int, pid: int, file: Path, before: int) -> Dump:
    letter = state_of(pid)
    stack = ""
    with suppress(OSError):
        stack = file.read_bytes()[before:].decode(errors="replace")
    parts = [
        f"rank {rank}, process {pid}, state {letter}{f': {STATES[letter]}' if letter in STATES else ''}",
        f"waits in the kernel at: {_read(Path(f'/proc/{pid}/wchan')) or 'unknown'}",
        stack or _py_spy(pid) or "It did not tell its stacks: it is stopped, inside the kernel, or no process of trainrun's.",
    ]
    return Dump(rank=rank, pid=pid, state=letter, text="\n".join(parts) + "\n")


def _rank_of(pid: int) -> int:
    """The rank's number, from its environment; its process number, negative, where that has none."""
    found = re.search(rb"(?:^|\0)RANK=(\d+)\0", _read_bytes(Path(f"/proc/{pid}/environ")) + b"\0")
    return int(found.group(1)) if found else -pid


def _tells(pid: int) -> bool:
    """Whether the process handles the signal; another would die of it."""
    if stacks.NUMBER is None:
        return False
    found = re.search(r"^SigCgt:\s+([0-9a-f]+)", _read(Path(f"/proc/{pid}/status")), flags=re.MULTILINE)
    return found is not None and bool(int(found.group(1), 16) >> (stacks.NUMBER - 1) & 1)


def _ask(pid: int) -> bool:
    assert stacks.NUMBER is not None
    try:
        os.kill(pid, stacks.NUMBER)
    except ProcessLookupError:
        return False
    return True


def _py_spy(pid: int) -> str:
    """The stacks as py-spy shows them, where the image has it."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        command = [program, "dump", "--nonblocking", "--pid", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    return ""


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _read(file: Path) -> str:
    return _read_bytes(file).decode(errors="replace").strip()


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
