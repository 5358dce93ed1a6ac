"""Whole trees of processes: each rank runs in a session of its own, so no process group holds them all."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Have processes whose parent dies become children of this one, so that they can be found (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """All living processes below ``pid``, parents before children."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    children: dict[int, list[int]] = {}
    for line in listing.stdout.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found = [pid]
    for parent in found:  # grows while it is walked
        found.extend(children.get(parent, []))
    return found[1:]


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
