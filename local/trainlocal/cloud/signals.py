"""Signals that resources of a stack wait for, and the times that templates give for them."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from threading import Condition

_DURATION = re.compile(r"PT(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?(?:(?P<seconds>\d+)S)?")


@dataclass(frozen=True, kw_only=True)
class Signal:
    """What somebody says of a resource that is being made or changed."""

    unique_id: str
    succeeded: bool
    reason: str = ""
    data: str = ""


class Signals:
    """The signals of one stack, by the resource (or the handle's URL) that they were sent to. For many threads."""

    def __init__(self) -> None:
        self._received: dict[str, dict[str, Signal]] = {}
        self._changed = Condition()

    def expect(self, target: str) -> None:
        """Forgets what was sent to a target: what counts is sent from now on."""
        with self._changed:
            self._received[target] = {}

    def send(self, target: str, signal: Signal) -> bool:
        """Takes a signal; False when there was one of the same unique id, which is the one that counts."""
        with self._changed:
            received = self._received.setdefault(target, {})
            if signal.unique_id in received:
                return False
            received[signal.unique_id] = signal
            self._changed.notify_all()
            return True

    def received(self, target: str) -> list[Signal]:
        """The signals that were sent to a target, in the order in which they came."""
        with self._changed:
            return list(self._received.get(target, {}).values())

    def wait(self, target: str, *, count: int, seconds: float, failures: int = 0) -> list[Signal]:
        """Waits for ``count`` signals, for more than ``failures`` of failure, or for the end of the time; returns all so far."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                received = list(self._received.get(target, {}).values())
                failed = sum(not signal.succeeded for signal in received)
                left = deadline - time.monotonic()
                if len(received) >= count or failed > failures or left <= 0:
                    return received
                self._changed.wait(min(left, 1.0))


def wait_for_resource_signals(signals: Signals, target: str, *, count: int, seconds: float, percent: int = 100) -> None:
    """Waits for instances to signal, as CloudFormation does.

    Args:
        signals: of the stack.
        target: the resource.
        count: signals wanted.
        seconds: how long to wait.
        percent: of them that must be of success.

    Raises:
        ValueError: too many failed or said nothing, in CloudFormation's words.
    """
    wanted = math.ceil(count * percent / 100)
    received = signals.wait(target, count=count, seconds=seconds, failures=count - wanted)
    failed = sum(not signal.succeeded for signal in received)
    succeeded = len(received) - failed
    if failed > count - wanted:
        raise ValueError(
            f"Received {failed} FAILURE signal(s) out of {count}. "
            f"Unable to satisfy {percent}% MinSuccessfulInstancesPercent requirement"
        )
    if succeeded < wanted:
        raise ValueError(f"Failed to receive {count - len(received)} resource signal(s) within the specified duration")


def seconds_of(duration: str, *, where: str) -> float:
    """The seconds of a duration such as "PT1H30M".

    Raises:
        ValueError: it is none.
    """
    found = _DURATION.fullmatch(duration)
    if not found or duration == "PT":
        raise ValueError(f"{where}: {duration!r} is not a duration such as PT15M")
    hours, minutes, seconds = (int(found[name] or 0) for name in ("hours", "minutes", "seconds"))
    return hours * 3600.0 + minutes * 60.0 + seconds
