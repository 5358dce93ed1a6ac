"""A bar for bytes that move, for as long as a command works on them."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from trainrun.metrics.bar import open_bar
from trainrun.metrics.console import duration, sized


class ByteBar:
    """Shows how many of ``total`` bytes are done, on a terminal; elsewhere it is silent. Any thread may tell it of more.

    Args:
        verb: what happens to them, such as "verified".
        total: bytes in all, as far as known.
    """

    def __init__(self, verb: str, total: int) -> None:
        self._verb, self._total = verb, max(1, total)
        self._bar = open_bar(1)
        self._lock = threading.Lock()
        self._done = 0
        self._started = time.monotonic()

    def add(self, count: int) -> None:
        """So many more bytes are done."""
        with self._lock:
            self._done = min(self._total, self._done + count)
            if self._bar:
                seconds = max(1e-9, time.monotonic() - self._started)
                rate = self._done / seconds
                left = (self._total - self._done) / max(1.0, rate)
                fields = [
                    f"{sized(self._done)} of {sized(self._total)} {self._verb}",
                    f"{sized(rate)}/s",
                    f"{duration(left)} left",
                ]
                self._bar.show(self._done / self._total, fields)

    def __enter__(self) -> ByteBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.close()
