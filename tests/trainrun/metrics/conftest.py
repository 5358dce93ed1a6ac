"""A terminal that is only as clever as the bar needs: what a person would see."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import sys
import termios
import tty
from collections.abc import Iterator
from typing import TextIO

import pytest

from trainrun.metrics import bar


class Terminal:
    """A pseudo-terminal and its screen.

    Args:
        columns: its width.
    """

    def __init__(self, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._master, slave = os.openpty()
        tty.setraw(slave)
        self.stream: TextIO = os.fdopen(slave, "w", encoding="utf-8")
        self._written = ""
        self.resize(columns)

    def connect(self) -> None:
        """Let stdout and stderr lead here, as a test cannot ask a fixture: pytest puts its own in between."""
        self._monkeypatch.setattr(sys, "stdout", self.stream)
        self._monkeypatch.setattr(sys, "stderr", self.stream)

    def resize(self, columns: int) -> None:
        self.columns = columns
        fcntl.ioctl(self.stream, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def screen(self) -> list[str]:
        """The lines, as they look after everything that was written so far."""
        self.stream.flush()
        os.set_blocking(self._master, False)
        while True:
            try:
                self._written += os.read(self._master, 65536).decode()
            except BlockingIOError:
                break
        rows, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[K|[\s\S]", self._written):
            if part == "\r":
                column = 0
            elif part == "\n":
                rows.append("")
                row, column = row + 1, 0
            elif part == "\x1b[K":
                rows[row] = rows[row][:column]
            else:
                if column == self.columns:  # what does not fit goes on in the next row
                    rows.append("")
                    row, column = row + 1, 0
                line = rows[row].ljust(column)
                rows[row] = line[:column] + part + line[column + 1 :]
                column += 1
        return [line.rstrip() for line in rows]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """80 columns, to which stdout and stderr lead once a test calls ``connect()``; every update of a bar is drawn."""
    made = Terminal(80, monkeypatch)
    monkeypatch.setattr(bar, "SECONDS_BETWEEN_DRAWS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    yield made
    made.stream.close()
