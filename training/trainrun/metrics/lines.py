"""Metrics as JSON lines in ``$TRAINRUN_STATE/metrics``, which the node agent sends on."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from io import FileIO
from pathlib import Path
from typing import Any

LINES_PER_FILE = 1000


class MetricLines:
    """Appends one line a record, flushed; a new file begins after so many lines, so that each is sent when it is full.

    Args:
        directory: made when the first line is written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started = int(time.time() * 1000)
        self._file: FileIO | None = None
        self._lines = 0
        self._told = False

    def write(self, record: dict[str, Any]) -> None:
        """Append ``record`` with the time, in seconds since the epoch. Numbers that JSON lacks (inf, nan) become null.

        A disk that is full costs lines, not the run: that is told once, and lines go on when there is room again.
        """
        line = json.dumps({"time": round(time.time(), 3), **_finite(record)}, allow_nan=False) + "\n"
        try:
            self._append(line.encode())
        except OSError as error:
            if not self._told:
                text = f"WARNING: metric lines are lost while {self._directory} cannot be written: {error}"
                print(text, file=sys.stderr, flush=True)
            self._told = True
            return
        self._told = False
        self._lines += 1

    def _append(self, line: bytes) -> None:
        if self._file is None or self._lines % LINES_PER_FILE == 0:
            self._next_file()
        assert self._file is not None
        end = self._file.tell()
        written = self._file.write(line)
        if written != len(line):
            self._file.truncate(end)  # no half lines
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the present file; a later line begins another."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next_file(self) -> None:
        self.close()
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{self._started}-{self._lines // LINES_PER_FILE:05}.jsonl"
        self._file = path.open("ab", buffering=0)


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()}
