"""What the agent did, step by step, for whoever watches the run.

Each step is reported when it starts and when it is done or has failed: to a file on the node, whole to one object
per node in the run's folder, and line by line to the node's stream in the cluster's log group, if it has one.
Sending happens beside the work: a service that fails delays nobody.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from botocore.exceptions import BotoCoreError, ClientError

from trainrun.node.files import write_whole
from trainrun.node.log_stream import LogStream
from trainrun.node.metadata import Identity
from trainrun.node.outcome import Leave
from trainrun.store import Store

Step = Literal["bootstrap", "prepare", "software", "check", "ready", "meet", "train", "watch", "recover", "finish"]
State = Literal["started", "done", "failed"]

RETRY_SECONDS = 5.0

log = logging.getLogger(__name__)


class Report:
    """What a running step wants to say when it is done."""

    detail: str = ""


class Events:
    """The node's events. Use as a context manager: leaving it sends what has not been sent."""

    def __init__(self, *, identity: Identity, path: Path, store: Store, stream: LogStream | None = None) -> None:
        """Args:
        identity: who reports.
        path: the file; lines are appended.
        store: the run's folder; the object is nodes/<instance id>.jsonl.
        stream: where new lines go besides.
        """
        self.failed_step = ""
        """The step that failed last."""
        self._stream = stream
        self._unlogged: list[tuple[float, str]] = []
        self._identity = identity
        self._path = path
        self._text = path.read_text(encoding="utf-8") if path.exists() else ""
        self._store = store
        self.key = f"nodes/{identity.node}.jsonl"
        self._writing = threading.Lock()
        self._sending = threading.Lock()
        self._unsent = threading.Event()
        self._closing = threading.Event()
        self._sender = threading.Thread(target=self._send_as_they_come, name="events", daemon=True)

    def __enter__(self) -> Events:
        self._sender.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._unsent.set()
        self._sender.join(timeout=2 * RETRY_SECONDS)

    def report(self, step: Step, state: State, *, seconds: float = 0.0, detail: str = "") -> None:
        """Append one line and have it sent."""
        line = {
            "time": round(time.time(), 3),
            "node": self._identity.node,
            "address": self._identity.address,
            "step": step,
            "state": state,
            "seconds": round(seconds, 3),
            "detail": detail,
        }
        if state == "failed":
            self.failed_step = step
        log.log(logging.ERROR if state == "failed" else logging.INFO, "%s %s %s", step, state, detail)
        text = json.dumps(line)
        with self._writing:
            self._text += text + "\n"
            self._unlogged.append((time.time(), text))
            try:
                write_whole(self._path, self._text)
            except OSError as error:  # a disk that is full: the store has them all the same
                log.warning("%s cannot be written: %s", self._path, error)
        self._unsent.set()

    @contextmanager
    def step(self, step: Step) -> Iterator[Report]:
        """Report a step around a block: started, then done, or failed with the exception's text, which goes on.

        `Leave` is no failure: a node that is let go while it waits has done what it could.
        """
        started = time.monotonic()
        report = Report()
        self.report(step, "started")
        try:
            yield report
        except Leave as leave:
            self.report(step, "done", seconds=time.monotonic() - started, detail=str(leave))
            raise
        except Exception as error:
            self.report(step, "failed", seconds=time.monotonic() - started, detail=str(error) or type(error).__name__)
            raise
        self.report(step, "done", seconds=time.monotonic() - started, detail=report.detail)

    def send(self) -> None:
        """Send the whole file, and what is new of it to the log stream, now.

        Raises:
            StoreError: the store did not take it.
        """
        with self._sending:  # else an older file could arrive after a newer one
            self._unsent.clear()
            self._store.put(self.key, self._text.encode())
            self._log_new_lines()

    def _log_new_lines(self) -> None:
        """Lines that the log group does not take are not sent again: the object in the store has them all."""
        with self._writing:
            lines, self._unlogged = self._unlogged, []
        if self._stream is None:
            return
        try:
            self._stream.append(lines)
        except (BotoCoreError, ClientError) as error:
            log.warning("%d events could not be sent to the log group: %s", len(lines), error)

    def _send_as_they_come(self) -> None:
        while True:
            self._unsent.wait()
            closing = self._closing.is_set()  # looked at before the attempt, so that there is one after it is set
            try:
                self.send()
            except Exception:
                log.exception("The events could not be sent to %s; trying again.", self._store.url)
                self._unsent.set()
                self._closing.wait(RETRY_SECONDS)
            if closing:
                return
