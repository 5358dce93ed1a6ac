"""What the agent watches beside its work: notices to the instance, the rendezvous host, the metric files."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from botocore.exceptions import BotoCoreError, ClientError

from trainrun.node.comparison import Comparison
from trainrun.node.departure import Departure
from trainrun.node.events import Events
from trainrun.node.files import write_whole
from trainrun.node.meet import Meet, Meeting, Silence
from trainrun.node.metadata import MetadataError
from trainrun.node.metric_files import MetricFiles
from trainrun.node.notices import LIFECYCLE, PATHS, Ask, Notice
from trainrun.node.periodic import Periodic
from trainrun.node.stalls import Stalls

NOTICE_SECONDS = 5.0
"""AWS suggests to ask for notices every 5 seconds (EC2 User Guide, "Spot Instance interruption notices")."""
DRILL_SECONDS = 0.5
"""How often it is looked for drills, which costs no request."""
HOST_SECONDS = 5.0
PROGRESS_SECONDS = 1.0
"""A look reads a file of some bytes for each rank."""

log = logging.getLogger(__name__)


class Kind(Protocol):
    """A kind of notice."""

    def look(self, ask: Ask, /) -> Iterator[Notice]:
        """What is new."""


class Drills:
    """Notices for exercise: a file ``<folder>/<path>`` is taken, once, as if the metadata service had said so."""

    def __init__(self, *, folder: Path, ask: Ask) -> None:
        self._folder, self._ask = folder, ask
        self._taken: dict[str, str] = {}

    def __call__(self, path: str) -> str | None:
        """The drill, when it is new; what the service says; the drill, where that says nothing."""
        file = self._folder / path
        with suppress(OSError):  # there is none
            text = file.read_text(encoding="utf-8", errors="replace")
            file.unlink()
            log.info("A drill: %s is %r.", path, text)
            self._taken[path] = text
            return text
        said = self._ask(path)
        return self._taken.get(path) if said is None else said

    def are_new(self) -> bool:
        """Whether there is one that is not taken yet."""
        return any((self._folder / path).is_file() for path in PATHS)

    def has(self, path: str) -> bool:
        """Whether there was a drill for it."""
        return path in self._taken


class Watch:
    """All kinds of notices, and what is done when there is one."""

    def __init__(
        self, *, kinds: Sequence[Kind], ask: Ask, drills: Path, departure: Departure, save_file: Path, events: Events
    ) -> None:
        """Args:
        kinds: of notices.
        ask: asks the metadata service, once: what fails is asked again at the next look.
        drills: folder of drills.
        departure: how the node leaves.
        save_file: written where a checkpoint is asked for.
        events: where each notice is reported, once.
        """
        self._kinds, self._service, self._drills = kinds, ask, Drills(folder=drills, ask=ask)
        self._departure, self._save_file, self._events = departure, save_file, events
        self._open: list[Notice] = []
        self._due = 0.0

    def look_when_due(self) -> None:
        """`look` every NOTICE_SECONDS, and whenever there is a drill."""
        if time.monotonic() >= self._due or self._drills.are_new():
            self._due = time.monotonic() + NOTICE_SECONDS
            self.look()

    def look(self) -> None:
        """Ask once for each kind. One that fails keeps no other from being seen.

        Raises:
            MetadataError: the metadata service gave no proper answer.
            botocore.exceptions.BotoCoreError, ClientError: EC2 or Auto Scaling gave none.
        """
        problem: Exception | None = None
        for kind in self._kinds:
            try:
                self._open += kind.look(self._drills)
            except (MetadataError, BotoCoreError, ClientError) as error:
                problem = problem or error
        while self._open:  # one that could not be acted on, as on a disk that is full, is acted on at the next look
            self._act(self._open[0])
            del self._open[0]
        self._departure.look(self._service)
        if problem is not None:
            raise problem

    def _act(self, notice: Notice) -> None:
        if notice.wish == "leave" and self._drills.has(LIFECYCLE):
            notice = replace(notice, wish="replace")  # nobody else ends a node that was only told so for exercise
        text = f"{notice.text[:1].upper()}{notice.text[1:]}."
        if notice.wish == "save":
            write_whole(self._save_file, f"{notice.text}\n")
            text += " All ranks are asked to save at their next step; training goes on."
        elif notice.wish != "nothing":
            seconds = self._departure.ask(notice)
            then = {"replace": "this node leaves and is replaced", "end the run": "the run ends"}
            text += f" All ranks are asked to save within {seconds:.0f} s; {then.get(notice.wish, 'this node leaves')}."
        self._events.report("watch", "done", detail=text)


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


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What looks at one launch."""

    regroup: Regroup
    stalls: Stalls
    comparison: Comparison


@contextmanager
def watching(watched: Watched, *, metric_files: MetricFiles, publish_seconds: float, nodes: int) -> Iterator[None]:
    """Watch the launch around a block, each thing in a thread of its own, so that a slow store delays none of them."""
    with ExitStack() as stack:
        stack.enter_context(Periodic("Sending metrics", publish_seconds, metric_files.send))
        # All nodes together ask about twice a second at most, however many they are: the API is shared and throttled.
        stack.enter_context(Periodic("Looking for the rendezvous host", max(HOST_SECONDS, nodes / 2), watched.regroup.look))
        stack.enter_context(Periodic("Looking for ranks that hang", PROGRESS_SECONDS, watched.stalls.look))
        stack.enter_context(Periodic("Looking at steps", PROGRESS_SECONDS, watched.comparison.sample))
        stack.enter_context(Periodic("Comparing ranks", publish_seconds, watched.comparison.tell_and_compare))
        yield
