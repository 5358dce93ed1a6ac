"""Whole trees of processes: each rank runs in a session of its own, so no process group holds them all."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Have processes whose parent dies become children of this one, so that they can be found (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """All living processes below ``pid``, parents before children."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents().items():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for parent in found:  # grows while it is walked
        found.extend(children.get(parent, []))
    return found[1:]


def ranks_below(*pids: int) -> list[int]:
    """The ranks among the processes below ``pids``: each is the first of its branch whose environment holds LOCAL_RANK.

    What a rank starts inherits the variable, and a data loader that got a rank's signal would die of it.
    """
    parents = _parents()
    ranks = []
    for process in dict.fromkeys(process for pid in pids for process in descendants(pid)):
        above = parents.get(process)
        if _starts_with_rank(process) and not (above is not None and _starts_with_rank(above)):
            ranks.append(process)
    return ranks


def _starts_with_rank(pid: int) -> bool:
    """Whether LOCAL_RANK was in the environment with which a process began. Where there is no /proc it is asked of ps."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except FileNotFoundError:
        shown = subprocess.run(["ps", "-E", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, check=False).stdout
        variables = [] if sys.platform == "linux" else shown.split()
    except OSError:  # it has ended meanwhile, or is not ours
        return False
    return any(variable.startswith(b"LOCAL_RANK=") for variable in variables)


def kill_descendants(pid: int) -> None:
    """SIGKILL to all processes below ``pid``, until none is left that could make new ones."""
    for _ in range(20):
        alive = [process for process in descendants(pid) if not _gone(process)]
        if not alive:
            return
        for process in alive:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def _parents() -> dict[int, int]:
    """Each process's parent."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    pairs = (line.split() for line in listing.stdout.splitlines())
    return {int(child): int(parent) for child, parent in pairs}


def _gone(pid: int) -> bool:
    """Whether the process is no more; a dead child of this process is taken note of, so that it is no zombie."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
