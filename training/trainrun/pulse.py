"""What a run's own loop tells the node agent of its progress (`trainrun.progress`)."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from trainrun import stacks
from trainrun.progress import Phase, ProgressFile


class Pulse:
    """The progress of one rank through its steps. Without a state directory nothing is told."""

    def __init__(self, state_directory: Path | None, rank: int) -> None:
        self._file: ProgressFile | None = None
        self._phase_of_steps: Phase = "starting"  # the first step compiles, and waits for all who begin
        self._began = self._own = 0.0
        self._arrived = False
        if state_directory is not None:
            with suppress(OSError):  # a disk that is full: nobody is told then, and training goes on
                stacks.tell_on_signal(state_directory, rank)
                self._file = ProgressFile(state_directory, rank)

    def begin(self, step: int) -> None:
        """A step begins."""
        if self._file is not None:
            self._began, self._own, self._arrived = time.perf_counter(), 0.0, False
            self._file.write(self._phase_of_steps, step=step - 1)

    def arrive(self, step: int) -> None:
        """The step has come to where ranks first wait for each other."""
        if self._file is not None and not self._arrived:
            self._arrived, self._own = True, time.perf_counter() - self._began
            self._file.write(self._phase_of_steps, step=step - 1, arrived=step)

    def done(self, step: int) -> None:
        """The step is done; what follows may take long."""
        if self._file is not None:
            self._phase_of_steps = "training"
            self._file.write("between", step=step, own_seconds=self._own)

    def end(self, step: int) -> None:
        """There is no further step."""
        if self._file is not None:
            self._file.write("ended", step=step)
