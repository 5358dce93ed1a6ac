"""Metrics as JSON lines in ``$TRAINRUN_STATE/metrics``, which the node agent sends on."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any, TextIO

LINES_PER_FILE = 1000


class MetricLines:
    """Appends one line a record, flushed; a new file begins after so many lines, so that each is sent when it is full.

    Args:
        directory: made when the first line is written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started = int(time.time() * 1000)
        self._file: TextIO | None = None
        self._lines = 0

    def write(self, record: dict[str, Any]) -> None:
        """Append ``record`` with the time, in seconds since the epoch. Numbers that JSON lacks (inf, nan) become null."""
        if self._file is None or self._lines % LINES_PER_FILE == 0:
            self._next_file()
        assert self._file is not None
        self._file.write(json.dumps({"time": round(time.time(), 3), **_finite(record)}, allow_nan=False) + "\n")
        self._file.flush()
        self._lines += 1

    def close(self) -> None:
        """Close the present file; a later line begins another."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next_file(self) -> None:
        self.close()
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{self._started}-{self._lines // LINES_PER_FILE:05}.jsonl"
        self._file = path.open("a", encoding="utf-8")


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()}
