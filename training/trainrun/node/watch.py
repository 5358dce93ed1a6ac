"""What the agent watches beside the training: notices of the instance, the rendezvous host, the metric files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path

from trainrun.node.events import Events
from trainrun.node.meet import Meet, Meeting, Silence
from trainrun.node.metadata import Metadata
from trainrun.node.metric_files import MetricFiles
from trainrun.node.periodic import Periodic

NOTICE_SECONDS = 5.0
"""AWS suggests to ask for notices every 5 seconds (EC2 User Guide, "Spot Instance interruption notices")."""
HOST_SECONDS = 5.0


class Notices:
    """Spot interruption notices and rebalance recommendations of this instance."""

    def __init__(self, *, metadata: Metadata, stop_file: Path, stop_grace: float, events: Events) -> None:
        """Args:
        metadata: the instance metadata service.
        stop_file: written on an interruption notice, so that all ranks save and leave.
        stop_grace: seconds after which the agent ends the ranks, whatever the notice says.
        events: where each notice is reported, once.
        """
        self._metadata = metadata
        self._stop_file = stop_file
        self._stop_grace = stop_grace
        self._events = events
        self._seen: set[str] = set()

    def look(self) -> None:
        """Ask once.

        Raises:
            MetadataError: the service gave no proper answer.
        """
        action = self._metadata.get("spot/instance-action")
        if action is not None and self._is_new("spot/instance-action"):
            self._interrupt(action)
        rebalance = self._metadata.get("events/recommendations/rebalance")
        if rebalance is not None and self._is_new("events/recommendations/rebalance"):
            self._events.report("watch", "done", detail=f"Rebalance recommendation: {rebalance.strip()}. Training goes on.")

    def _interrupt(self, document: str) -> None:
        seconds = self._stop_grace
        try:
            notice = json.loads(document)
            reason = f"spot interruption notice: {notice['action']} at {notice['time']}"
            seconds = min(seconds, _seconds_until(notice["time"]) or seconds)
        except (ValueError, KeyError, TypeError):  # a notice that cannot be read is a notice
            reason = f"spot interruption notice: {document.strip()}"
        new = self._stop_file.with_suffix(".new")  # the ranks may read it at any moment, and take its first number for their time
        new.write_text(f"{seconds:.0f} seconds left; {reason}\n", encoding="utf-8")
        new.replace(self._stop_file)
        self._events.report(
            "watch", "done", detail=f"{reason}. All ranks are asked to save within {seconds:.0f} s; this node leaves."
        )

    def _is_new(self, path: str) -> bool:
        if path in self._seen:
            return False
        self._seen.add(path)
        return True


def _seconds_until(moment: str) -> float | None:
    """From now; None when that is over, which only a wrong clock can make of a notice."""
    at = datetime.strptime(moment, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    seconds = (at - datetime.now(timezone.utc)).total_seconds()
    return seconds if seconds > 0 else None


class Regroup:
    """Whether the nodes must meet anew although torchrun goes on."""

    def __init__(self, *, meet: Meet, meeting: Meeting) -> None:
        self._meet = meet
        self._meeting = meeting
        self._silence = Silence()
        self.reason = ""

    def look(self) -> None:
        """Ask once, until there is a reason.

        Raises:
            botocore.exceptions.BotoCoreError, ClientError, StoreError: a request failed.
        """
        self.reason = self.reason or self._meet.lost(self._meeting, self._silence)


@contextmanager
def watching(
    *, notices: Notices, metric_files: MetricFiles, regroup: Regroup, publish_seconds: float, nodes: int
) -> Iterator[None]:
    """Watch all of it around a block, each in a thread of its own, so that a slow store delays no notice."""
    with ExitStack() as stack:
        stack.enter_context(Periodic("Asking for notices", NOTICE_SECONDS, notices.look))
        stack.enter_context(Periodic("Sending metrics", publish_seconds, metric_files.send))
        # All nodes together ask about twice a second at most, however many they are: the API is shared and throttled.
        stack.enter_context(Periodic("Looking for the rendezvous host", max(HOST_SECONDS, nodes / 2), regroup.look))
        yield
