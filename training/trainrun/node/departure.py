"""How a node leaves that was given notice: its ranks save, and then its group hears of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from trainrun.node.files import write_whole
from trainrun.node.group import Group
from trainrun.node.metadata import MetadataError
from trainrun.node.notices import Ask, Notice, is_terminating
from trainrun.node.outcome import Leave
from trainrun.spec_cluster import hook_heartbeat

LINGER_SECONDS = 2.0
TELLING_SECONDS = 600.0
"""For the group to take word that this node is to be replaced; then EC2's own end of the instance has to do."""

log = logging.getLogger(__name__)


def leave_if_asked(stop_file: Path) -> None:
    """Raises:
    Leave: there is a stop file.
    """
    if stop_file.exists():
        reason = stop_file.read_text(encoding="utf-8", errors="replace").strip() or "no reason given"
        raise Leave(f"Asked to stop by {stop_file} ({reason}). Remove that file and restart the agent to go on.")


class Departure:
    """Asks the ranks to save and leave, and tells the group when they have. Its methods may be called from any thread."""

    def __init__(self, *, stop_file: Path, stop_grace: float, group: Group, hook: str) -> None:
        """Args:
        stop_file: asks the ranks.
        stop_grace: seconds after which the agent ends the ranks, whatever a notice says.
        group: the node's.
        hook: name of the group's lifecycle hook; empty means none.
        """
        self._stop_file, self._stop_grace = stop_file, stop_grace
        self._group, self._hook = group, hook
        self._lock = threading.Lock()
        self._training = False
        self._deadline: float | None = None
        self._replace = ""
        self._heartbeat_at = 0.0
        self._released = not hook
        self.ends_run = ""
        """Why the whole run is to end, once it is."""

    def ask(self, notice: Notice) -> float:
        """Ask the ranks to save and leave. Returns the seconds that they have; of several notices the first to end counts."""
        seconds = self._stop_grace if notice.seconds is None else min(self._stop_grace, notice.seconds)
        deadline = time.monotonic() + seconds
        with self._lock:
            if notice.wish == "replace":
                self._replace = self._replace or notice.text
            if notice.wish == "end the run":
                self.ends_run = notice.text
            if self._deadline is None:
                self._heartbeat_at = time.monotonic() + hook_heartbeat(self._stop_grace) / 2
            if self._deadline is None or deadline < self._deadline or not self._stop_file.exists():
                self._deadline = deadline
                write_whole(self._stop_file, f"{seconds:.0f} seconds left; {notice.text}\n")
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
