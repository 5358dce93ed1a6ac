"""What the instance metadata service may have to say to a node, one class for each kind of notice.

Each is asked again and again, and gives every notice once. That a notice cannot be read is no reason to pass over it: its
presence says the most of it.

Sources: EC2 User Guide, "Spot Instance interruption notices", "EC2 instance rebalance recommendations", "View scheduled
events"; EC2 Auto Scaling User Guide, "Retrieve the target lifecycle state through instance metadata".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any, Literal

INTERRUPTION = "spot/instance-action"
REBALANCE = "events/recommendations/rebalance"
SCHEDULED = "events/maintenance/scheduled"
LIFECYCLE = "autoscaling/target-lifecycle-state"
PATHS = (INTERRUPTION, REBALANCE, SCHEDULED, LIFECYCLE)

SPOT_SECONDS = 120.0
"""What EC2 gives from a spot interruption notice on."""
SCHEDULED_MARGIN = timedelta(minutes=15)
"""How long before a scheduled event a node leaves: a replacement has to start, too, before the others can go on."""

Wish = Literal["nothing", "save", "leave", "replace", "end the run"]
"""What a notice asks for: a checkpoint; the node to save and leave, and be replaced if need be; all nodes to save and leave."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """One notice."""

    text: str
    """What it says."""
    wish: Wish = "nothing"
    seconds: float | None = None
    """What is left until the instance ends, where that is known."""


Now = Callable[[], datetime]
Ask = Callable[[str], str | None]
"""Asks for an item of the metadata, by its path; None when there is none."""


def utc_now() -> datetime:
    """The moment, by this node's clock."""
    return datetime.now(timezone.utc)


class SpotInterruption:
    """EC2 takes the instance back in two minutes."""

    def __init__(self, *, now: Now = utc_now) -> None:
        self._now = now
        self._seen = False

    def look(self, ask: Ask) -> Iterator[Notice]:
        document = ask(INTERRUPTION)
        if document is None or self._seen:
            return
        self._seen = True
        seconds = SPOT_SECONDS
        try:
            notice = json.loads(document)
            what = f"{notice['action']} at {notice['time']}"
            left = (_moment(notice["time"]) - self._now()).total_seconds()
            seconds = min(left, SPOT_SECONDS) if left > 0 else SPOT_SECONDS  # a time that is over is a clock that is wrong
        except (ValueError, KeyError, TypeError):
            what = document.strip()
        yield Notice(text=f"spot interruption notice: {what}", wish="replace", seconds=seconds)


class RebalanceRecommendation:
    """EC2 sees an elevated risk that it takes the instance back."""

    def __init__(self) -> None:
        self._seen = ""

    def look(self, ask: Ask) -> Iterator[Notice]:
        document = ask(REBALANCE)
        if document is None or document == self._seen:
            return
        self._seen = document
        try:
            when = f" of {json.loads(document)['noticeTime']}"
        except (ValueError, KeyError, TypeError):
            when = f": {document.strip()}"
        yield Notice(text=f"rebalance recommendation{when}", wish="save")


class ScheduledEvents:
    """EC2 reboots, stops or retires the instance at a time that it tells beforehand."""

    def __init__(self, *, stop_grace: float, now: Now = utc_now) -> None:
        """Args:
        stop_grace: seconds that the ranks have to save, which the margin has to hold.
        """
        self._margin = max(SCHEDULED_MARGIN, timedelta(seconds=2 * stop_grace))
        self._now = now
        self._told: set[str] = set()
        self._left: set[str] = set()

    def look(self, ask: Ask) -> Iterator[Notice]:
        """A document that is torn is none: the next look reads it again."""
        document = ask(SCHEDULED)
        if document is None:
            return
        try:
            events = json.loads(document)
        except ValueError:
            return
        for event in events if isinstance(events, list) else []:
            if isinstance(event, dict) and event.get("State", "active") == "active":
                yield from self._look_at(event)

    def _look_at(self, event: dict[str, Any]) -> Iterator[Notice]:
        begins = _moment_of_event(event.get("NotBefore"))
        name = f"{event.get('EventId')} {event.get('NotBefore')}"  # one that is put off is another
        what = f"scheduled event {event.get('Code', 'of an unknown kind')}, not before {event.get('NotBefore', 'a time unknown')}"
        if begins is not None and self._now() >= begins - self._margin:
            if name not in self._left:
                self._left.add(name)
                left = (begins - self._now()).total_seconds()
                yield Notice(text=what, wish="replace", seconds=left if left > 0 else None)
        elif name not in self._told:
            self._told.add(name)
            yield Notice(text=f"{what} ({event.get('Description', 'no description')})")


class Termination:
    """The Auto Scaling group ends the instance: it is scaled in, or replaced."""

    def __init__(self) -> None:
        self._seen = False

    def look(self, ask: Ask) -> Iterator[Notice]:
        if not self._seen and is_terminating(ask):
            self._seen = True
            yield Notice(text="the Auto Scaling group ends this instance", wish="leave")


def is_terminating(ask: Ask) -> bool:
    """Whether the Auto Scaling group has decided to end this instance."""
    return (ask(LIFECYCLE) or "").strip() == "Terminated"


def _moment(text: str) -> datetime:
    """As spot notices write it.

    Raises:
        ValueError: it is no such moment.
    """
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)


def _moment_of_event(text: object) -> datetime | None:
    """As scheduled events write it: "21 Jan 2019 09:00:43 GMT". None for anything else."""
    try:
        found = parsedate_to_datetime(str(text))
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)
