"""Stop requests: a signal or a file that one rank sees, on which all ranks then agree (`trainrun.agreement`)."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from trainrun.deadline import seconds_in, seconds_of, urgency

EXIT_CODE = 75
"""EX_TEMPFAIL: asked to stop, not failed. 0 would tell torchrun that the whole job is done."""


class StopFlag:
    """Whether someone asked this rank to stop: by SIGTERM, or by the file ``$TRAINRUN_STATE/stop``, and how long there is.

    Attributes:
        deadline: the `time.monotonic` at which the ranks are killed, once all of them know of a request; None before.
    """

    def __init__(self, state_directory: Path | None, *, stop_seconds: float) -> None:
        """Args:
        state_directory: where the file would be.
        stop_seconds: what there is from a SIGTERM on, or from a file on that holds no number.
        """
        self._file = state_directory / "stop" if state_directory else None
        self._stop_seconds = stop_seconds
        self._signalled: float | None = None
        self._started = time.time()
        self._told = 0.0
        self.deadline: float | None = None
        signal.signal(signal.SIGTERM, self._on_signal)

    def urgency(self) -> int:
        """What this rank has to tell the others (`trainrun.deadline.urgency`); `hear` takes the largest of all."""
        self._told = time.monotonic()
        if self._signalled is None and (self._file is None or not os.path.exists(self._file)):  # noqa: PTH110 - once a step: a third of the cost
            return 0
        return urgency(self._seconds_left())

    def asked_by(self) -> str:
        """How this rank was asked, for people."""
        if self._signalled is not None:
            return "by SIGTERM"
        if self._file is None or not self._file.exists():
            return "through another rank"
        with suppress(OSError):
            if self._file.stat().st_mtime < self._started:
                return f"by {self._file}, which is older than this process: delete it to train on"
        return f"by {self._file}"

    def hear(self, largest: int) -> None:
        """The largest urgency of all ranks, as of the last time that they told."""
        if largest:
            deadline = self._told + seconds_of(largest)
            self.deadline = deadline if self.deadline is None else min(deadline, self.deadline)

    def _seconds_left(self) -> float:
        """Until this rank is killed, as far as it knows by itself."""
        left = [] if self._signalled is None else [self._signalled + self._stop_seconds - time.monotonic()]
        if self._file is not None:
            with suppress(OSError):  # there is none, or none that can be read: that alone asks, too
                age = time.time() - max(self._file.stat().st_mtime, self._started)
                given = seconds_in(self._file.read_text(errors="replace"), otherwise=self._stop_seconds)
                left.append(given - max(0.0, age))
        return min(left, default=self._stop_seconds)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = self._signalled or time.monotonic()  # who asks twice does not give more time
