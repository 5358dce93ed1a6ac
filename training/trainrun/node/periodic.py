"""Something that is done again and again beside the work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Periodic:
    """Calls a function every so many seconds in a thread of its own. Use as a context manager.

    An exception is logged and does not end it: a service that fails for an hour must not end what watches it.
    """

    def __init__(self, name: str, seconds: float, function: Callable[[], None]) -> None:
        self._name = name
        self._seconds = seconds
        self._function = function
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Periodic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()  # the thread may be amid a request; it is not waited for

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._function()
            except Exception:
                log.exception("%s failed; trying again in %g s.", self._name, self._seconds)
            self._stop.wait(self._seconds)
