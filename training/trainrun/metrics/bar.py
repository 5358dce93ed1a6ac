"""A live bar on the last line of a terminal, below everything else that is printed."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any, TextIO

from trainrun.metrics.console import duration, fitting, scaled

SECONDS_BETWEEN_DRAWS = 0.1
LEAST_GRAPH, MOST_GRAPH = 10, 40


def open_bar(steps: int) -> Bar | None:
    """A bar on the terminal that stderr, else stdout, leads to; None when there is no terminal that could show one."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    terminal = next((stream for stream in (sys.stderr, sys.stdout) if stream is not None and stream.isatty()), None)
    return None if terminal is None else Bar(terminal, steps)


class Bar:
    """Rewrites one line in place. While it is open, what Python code prints to the same terminal appears above it.

    What other code writes past Python (C libraries, other processes) it cannot know of.

    Args:
        terminal: where to draw.
        steps: of the whole run.
    """

    def __init__(self, terminal: TextIO, steps: int) -> None:
        self._terminal, self._steps = terminal, steps
        self._text = ""
        self._shown = False
        self._line_is_open = False
        self._drawn_at = 0.0
        self._lock = threading.RLock()
        self._streams = (sys.stdout, sys.stderr)
        sys.stdout, sys.stderr = (
            _Above(stream, self) if stream is not None and stream.isatty() else stream for stream in self._streams
        )

    @property
    def columns(self) -> int:
        """Width of the terminal at present."""
        try:
            return os.get_terminal_size(self._terminal.fileno()).columns or 80  # 0: a terminal that does not know
        except (OSError, ValueError):
            return 80

    def update(self, step: int, *, tokens_per_second: float, seconds_left: float) -> None:
        """Show that ``step`` is done; drawn at most ten times a second."""
        fields = [f"{step}/{self._steps}", f"{100 * step / self._steps:.1f}%"]
        if tokens_per_second:
            fields += [f"{duration(seconds_left)} left", f"{scaled(tokens_per_second)} tok/s"]
        self.show(step / self._steps, fields)

    def show(self, part: float, fields: list[str]) -> None:
        """Show that ``part`` (0 to 1) of all is done, and say ``fields`` of it; drawn at most ten times a second."""
        now = time.monotonic()
        if now - self._drawn_at < SECONDS_BETWEEN_DRAWS and part < 1:
            return
        self._drawn_at = now
        with self._lock:
            self._text = _with_graph(fitting(fields, self.columns - 1), part, self.columns - 1)
            self._draw()

    def write(self, stream: TextIO, text: str) -> int:
        """Write to ``stream`` above the bar."""
        with self._lock:
            self._clear()
            written = stream.write(text)
            stream.flush()
            if text:
                self._line_is_open = not text.endswith("\n")
            self._draw()
            return written

    def hide(self) -> None:
        """Take the bar away until the next update: for what is about to write past Python."""
        with self._lock:
            self._clear()

    def close(self) -> None:
        """Take the bar away and give the streams back."""
        with self._lock:
            self._clear()
            self._text = ""
            sys.stdout, sys.stderr = self._streams

    def _draw(self) -> None:
        if self._text and not self._line_is_open:
            self._terminal.write(f"\r{self._text}\x1b[K")
            self._terminal.flush()
            self._shown = True

    def _clear(self) -> None:
        if self._shown:
            self._terminal.write("\r\x1b[K")
            self._terminal.flush()
            self._shown = False


class _Above:
    """A stream whose text appears above the bar."""

    def __init__(self, stream: TextIO, bar: Bar) -> None:
        self._stream, self._bar = stream, bar

    def write(self, text: str) -> int:
        return self._bar.write(self._stream, text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _with_graph(text: str, part: float, width: int) -> str:
    room = min(width - len(text) - 3, MOST_GRAPH)
    if room < LEAST_GRAPH:
        return text
    full = int(part * room)
    return f"[{'#' * full}{'-' * (room - full)}] {text}"
