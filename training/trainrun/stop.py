"""Stop requests: a signal or a file that one rank sees, on which all ranks then agree (`trainrun.agreement`)."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from trainrun.deadline import seconds_in

EXIT_CODE = 75
"""EX_TEMPFAIL: asked to stop, not failed. 0 would tell torchrun that the whole job is done."""


class StopFlag:
    """Whether someone asked this rank to stop: by SIGTERM, or by the file ``$TRAINRUN_STATE/stop``."""

    def __init__(self, state_directory: Path | None) -> None:
        self._file = state_directory / "stop" if state_directory else None
        self._signalled: float | None = None
        self._started = time.time()
        signal.signal(signal.SIGTERM, self._on_signal)

    def seen(self) -> bool:
        """Whether this rank knows of a request."""
        return self._signalled is not None or (self._file is not None and os.path.exists(self._file))  # noqa: PTH110 - once a step: a third of the cost

    def left(self, otherwise: float) -> float | None:
        """Seconds that are left until this rank is killed; None while it knows of no request.

        Args:
            otherwise: what there is from a SIGTERM on, or from a file on that holds no number.
        """
        left = [] if self._signalled is None else [self._signalled + otherwise - time.monotonic()]
        if self._file is not None and self.seen():
            with suppress(FileNotFoundError):
                age = time.time() - max(self._file.stat().st_mtime, self._started)
                left.append(seconds_in(self._file.read_text(errors="replace"), otherwise=otherwise) - max(0.0, age))
        return max(0.0, min(left)) if left else None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = self._signalled or time.monotonic()  # who asks twice does not give more time
