"""How a node leaves that was given notice: its ranks save, and then its group hears of it."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from trainrun.deadline import seconds_in
from trainrun.node.files import write_whole
from trainrun.node.group import Group
from trainrun.node.metadata import MetadataError
from trainrun.node.notices import Ask, Notice, is_terminating
from trainrun.node.outcome import Leave
from trainrun.spec_cluster import hook_heartbeat

LINGER_SECONDS = 2.0
TELLING_SECONDS = 600.0
"""For the group to take word that this node is to be replaced; then EC2's own end of the instance has to do."""
END_THE_RUN = "end the run"
ENDS_THE_RUN = re.compile(rf"(?:[\d.]+(?:\s+seconds left)?[\s;:,.-]+)?{END_THE_RUN}\b(.*)", re.IGNORECASE | re.DOTALL)

log = logging.getLogger(__name__)


def asks_to_end(text: str) -> str:
    """Why the whole run is to end, as a stop file says that begins with "end the run", maybe after its seconds; "" for others."""
    found = ENDS_THE_RUN.match(text.strip())
    return (found[1].strip(" \t\n:;,.-") or "by hand") if found else ""


def leave_if_asked(stop_file: Path) -> None:
    """Raises:
    Leave: there is a stop file.
    """
    if stop_file.exists():
        reason = stop_file.read_text(encoding="utf-8", errors="replace").strip() or "no reason given"
        raise Leave(f"Asked to stop by {stop_file} ({reason}). Remove that file and restart the agent to go on.")


class Departure:
    """Asks the ranks to save and leave, and tells the group when they have. Its methods may be called from any thread.

    What else the notices wish is kept in departure.json beside the stop file for as long as that is there, so that the next
    agent carries it out if this one dies.
    """

    def __init__(self, *, stop_file: Path, stop_grace: float, group: Group, hook: str) -> None:
        """Args:
        stop_file: asks the ranks.
        stop_grace: seconds after which the agent ends the ranks, whatever a notice says.
        group: the node's.
        hook: name of the group's lifecycle hook; empty means none.
        """
        self._stop_file, self._stop_grace = stop_file, stop_grace
        self._wish_file = stop_file.with_name("departure.json")
        self._group, self._hook = group, hook
        self._lock = threading.Lock()
        self._training = False
        self._deadline: float | None = None
        self._replace = ""
        self._heartbeat_at = 0.0
        self._released = not hook
        self.ends_run = ""
        """Why the whole run is to end, once it is."""
        self._written = ""
        self._take_over()

    def ask(self, notice: Notice) -> float:
        """Ask the ranks to save and leave. Returns the seconds that they have; of several notices the first to end counts.

        So it does of a notice and a person's stop file, and if that ends the run, the run ends.
        """
        seconds = self._stop_grace if notice.seconds is None else min(self._stop_grace, notice.seconds)
        with self._lock:
            words = ""
            text, left = self._by_hand()
            seconds = min(seconds, left)
            deadline = time.monotonic() + seconds
            if reason := asks_to_end(text):
                words = f"{END_THE_RUN}: {reason}; "
                self.ends_run = self.ends_run or reason
            if notice.wish == "replace":
                self._replace = self._replace or notice.text
            if notice.wish == "end the run":
                self.ends_run = self.ends_run or notice.text
            if self._replace or self.ends_run:
                write_whole(self._wish_file, json.dumps({"replace": self._replace, "ends_run": self.ends_run}))
            if self._deadline is None:
                self._heartbeat_at = time.monotonic() + hook_heartbeat(self._stop_grace) / 2
            if self._deadline is None or deadline < self._deadline or not self._stop_file.exists():
                self._deadline = deadline
                written = f"{seconds:.0f} seconds left; {words}{notice.text}\n"
                write_whole(self._stop_file, written)
                self._written = written
        return seconds

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around the time in which there are ranks: until it is over the group hears nothing."""
        with self._lock:
            self._training = True
        try:
            yield
        finally:
            with self._lock:
                self._training = False

    def look(self, ask: Ask) -> None:
        """To be called again and again: prolongs the wait of the group while ranks save, and tells it when there are none.

        Raises:
            MetadataError: the metadata service gave no proper answer.
            botocore.exceptions.BotoCoreError, ClientError: the group could not be told; the next call tries again.
        """
        if self._deadline is None:
            return
        if self._training:
            self._prolong(ask)
            return
        self._tell()
        if not self._released and is_terminating(ask):
            self._release()

    def carry_out(self) -> None:
        """Tell the group what the notices asked for, now that the ranks have left."""
        give_up = time.monotonic() + TELLING_SECONDS
        while True:
            try:
                return self._tell()
            except (BotoCoreError, ClientError):
                if time.monotonic() > give_up:
                    raise
                log.exception("The group could not be told to replace this node; trying again.")
                time.sleep(LINGER_SECONDS)

    def linger(self, ask: Ask) -> None:
        """Wait, when all is done, for the group to end this node, so that it need not wait for its hook.

        Returns at once where there is no hook, and when the hook is completed.
        """
        while not self._released:
            try:
                if is_terminating(ask):
                    self._release()
            except MetadataError as error:
                log.warning("Asking again whether the group ends this node: %s", error)
            if not self._released:
                time.sleep(LINGER_SECONDS)

    def _take_over(self) -> None:
        """Take over what notices asked of an agent that is gone, unless a person has taken it back by deleting the stop file."""
        if not self._stop_file.exists():
            with suppress(OSError):
                self._wish_file.unlink()
            return
        with suppress(OSError, ValueError, TypeError, KeyError):
            wish = json.loads(self._wish_file.read_text(encoding="utf-8"))
            self._replace, self.ends_run = str(wish["replace"]), str(wish["ends_run"])
            self._deadline = time.monotonic()  # its ranks are gone
            log.info("An agent before this one was asked to leave: %s", wish)

    def _by_hand(self) -> tuple[str, float]:
        """What the stop file says that somebody else has written, and the seconds that are left of those that it gives."""
        try:
            text = self._stop_file.read_text(encoding="utf-8", errors="replace")
            age = max(0.0, time.time() - self._stop_file.stat().st_mtime)
        except OSError:
            return "", math.inf
        if text == self._written:
            return "", math.inf
        return text, max(0.0, seconds_in(text, otherwise=math.inf) - age)

    def _tell(self) -> None:
        with self._lock:
            if self._replace and not self.ends_run:
                self._group.replace_me(self._replace)
            self._replace = ""

    def _release(self) -> None:
        """Have the group end this node now. A refusal is not the last word: it comes, too, until the hook has begun."""
        with self._lock:
            if self._released:
                return
            try:
                self._group.complete_hook(self._hook)
                self._released = True
                log.info("The group may end this node: its hook %s is completed.", self._hook)
            except (BotoCoreError, ClientError) as error:
                log.warning("The hook %s cannot be completed yet: %s", self._hook, error)

    def _prolong(self, ask: Ask) -> None:
        """As long as there are ranks, which the agent ends when stop_grace is over."""
        if self._released or time.monotonic() < self._heartbeat_at or not is_terminating(ask):
            return
        self._heartbeat_at = time.monotonic() + hook_heartbeat(self._stop_grace) / 2
        self._group.heartbeat_hook(self._hook)
