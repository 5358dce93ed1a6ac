"""What a script that calls `trainrun.start` says when it ends by an error that its user can mend: sentences, no traceback."""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref
from types import TracebackType
from typing import TYPE_CHECKING

from trainrun import last_error
from trainrun.config import ConfigError
from trainrun.errors import CheckpointError
from trainrun.store import StoreError

if TYPE_CHECKING:
    from trainrun.run import Run

INTERRUPTED = 130
"""The exit code that shells give to a program ended by Ctrl-C."""

PATIENCE = 5.0
"""Seconds by which a rank that meets an error is at most ahead of its peers that meet the same."""


class Complaints:
    """The ``sys.excepthook`` of a training script. Errors that are not ours go to the hook that was there before."""

    def __init__(self) -> None:
        self._others = sys.excepthook
        self._run: weakref.ref[Run] | None = None

    def concerning(self, run: Run) -> None:
        """Let what is said of an interruption be about this run."""
        self._run = weakref.ref(run)

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            if _speaks():
                print(self._interrupted(), file=sys.stderr, flush=True)
            raise SystemExit(INTERRUPTED)
        last_error.record(error)
        if not _ours(kind, traceback):
            self._others(kind, error, traceback)
        elif _speaks():
            print(f"trainrun: {error}", file=sys.stderr, flush=True)
        else:
            _wait_to_be_ended()
            print(f"trainrun: rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)

    def _interrupted(self) -> str:
        run = self._run() if self._run is not None else None
        if run is None:
            return "Interrupted before the run began."
        saved = run.saved_step
        newest = "There is no checkpoint." if saved is None else f"The newest checkpoint is of step {saved}."
        return f"Interrupted at step {run.completed}. {newest}"


def install() -> Complaints:
    """Speak for this process from now on. The exit code of an error stays 1."""
    complaints = sys.excepthook if isinstance(sys.excepthook, Complaints) else Complaints()
    sys.excepthook = complaints
    return complaints


def _speaks() -> bool:
    """Whether this rank says what all say: one on each machine does, for each may have files of its own."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _wait_to_be_ended() -> None:
    """Let the rank that speaks come first: the launcher names it as the cause, and ends this one, which then says nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(PATIENCE)


def _ours(kind: type[BaseException], traceback: TracebackType | None) -> bool:
    """Whether the message says all there is to know. Python's own errors do where trainrun raised them."""
    if issubclass(kind, (ConfigError, CheckpointError, StoreError)):
        return True
    if kind not in (FloatingPointError, MemoryError) or traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return str(traceback.tb_frame.f_globals.get("__name__", "")).startswith("trainrun.")
