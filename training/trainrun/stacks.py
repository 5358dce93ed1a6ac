"""Where each rank's threads are, told on a signal: what is needed to see why a rank hangs."""

from __future__ import annotations

import faulthandler
import signal
import sys
from pathlib import Path
from typing import TextIO

FOLDER = "stacks"
"""Below ``$TRAINRUN_STATE``; one file a rank, named by the rank."""

NUMBER = int(signal.SIGRTMIN) + 9 if sys.platform == "linux" else None
"""The signal: a real-time one, of which no library that training uses makes use."""

_files: list[TextIO] = []  # faulthandler writes to the descriptor for as long as the process lives


def tell_on_signal(state: Path, rank: int) -> None:
    """From now on write the stacks of all threads to a file whenever the signal comes. Python code need not run for it."""
    if NUMBER is None:
        return
    folder = state / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / str(rank)).open("w", encoding="utf-8")
    _files.append(file)
    faulthandler.register(NUMBER, file=file, all_threads=True, chain=False)
