"""Trying again, for some minutes, what failed by something that may pass, such as a request to AWS; then the node is unfit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from trainrun.node.outcome import StepFailed
from trainrun.store import StoreError

PATIENCE_SECONDS = 300.0
PAUSE_SECONDS = 10.0

Result = TypeVar("Result")

log = logging.getLogger(__name__)


def patiently(action: Callable[[], Result]) -> Result:
    """Do something that may be done again, until it comes to an end or has failed for `PATIENCE_SECONDS`.

    A `StepFailed` passes at once: it is understood. So does a `StoreError`: a store that does not answer is no fault of the node.

    Raises:
        StepFailed: as the action; or it has failed by another error for so long.
    """
    give_up = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return action()
        except (StepFailed, StoreError):
            raise
        except Exception as error:
            if time.monotonic() > give_up:
                text = f"It has failed for {PATIENCE_SECONDS:g} s, the last time by {type(error).__name__}: {error}"
                raise StepFailed(text) from error
            log.exception("It failed by what may pass; trying again in %g s.", PAUSE_SECONDS)
            time.sleep(PAUSE_SECONDS)
