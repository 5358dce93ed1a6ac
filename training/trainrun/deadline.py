"""How long is left after a request to stop, on all ranks alike, and what can still be saved in that time. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainrun.settings.checkpoint import LONGEST_TIMEOUT

EXIT_SECONDS = 3.0
"""What the end of a process takes after its last upload: to hear that a writer was too slow, and to leave the others."""

_LONGEST_MILLISECONDS = int(LONGEST_TIMEOUT * 1000)


def seconds_in(text: str, *, otherwise: float) -> float:
    """How long the author of a stop file gives.

    Args:
        text: its content: a number of seconds, which a reason may follow; or a reason, or nothing.
        otherwise: when it holds no number.
    """
    first = text.split(maxsplit=1)[:1]
    try:
        seconds = float(first[0]) if first else otherwise
    except ValueError:
        return otherwise
    return otherwise if math.isnan(seconds) else max(0.0, seconds)


def urgency(seconds: float) -> int:
    """A request as a whole number: 0 is none, and of several the largest is the one that leaves the least time."""
    return 1 + _LONGEST_MILLISECONDS - int(1000 * min(max(0.0, seconds), LONGEST_TIMEOUT))


def seconds_of(urgency: int) -> float:
    """The seconds that were left when `urgency` was asked for."""
    return (1 + _LONGEST_MILLISECONDS - urgency) / 1000


@dataclass(frozen=True, kw_only=True)
class LastSave:
    """What can be done when all ranks have been asked to stop."""

    finish: bool
    """Wait for the save that is under way, if there is one."""
    save: bool
    """Then save the present step."""


def last_save(*, left: float, seconds: float | None, under_way: float | None) -> LastSave:
    """What fits.

    The save under way is finished first, for its bytes are on their way already; the present step follows where both fit.

    Args:
        left: seconds until the processes are killed.
        seconds: that a save takes by itself, as measured; None while nothing is measured, and then it is tried.
        under_way: for how many seconds another step's save has been under way; None when there is none.
    """
    time = left - EXIT_SECONDS
    if time <= 0:
        return LastSave(finish=False, save=False)
    rest = 0.0 if under_way is None or seconds is None else max(0.0, seconds - under_way)
    return LastSave(finish=under_way is not None, save=rest + (seconds or 0.0) <= time)
