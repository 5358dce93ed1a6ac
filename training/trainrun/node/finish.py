"""End the run: a durable result, a summary, word to people, and then the group's capacity."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from trainrun.node.departure import asks_to_end
from trainrun.node.group import Group
from trainrun.node.keep import moment
from trainrun.node.metric_files import MetricFiles
from trainrun.node.notify import keep_command, notify
from trainrun.node.outcome import Outcome
from trainrun.node.result import End, Result
from trainrun.node.summary import KEY as SUMMARY
from trainrun.node.summary import summarize
from trainrun.spec import RunSpec
from trainrun.store import Store, StoreError

STORE_SECONDS = 600.0

log = logging.getLogger(__name__)


def finish(
    outcome: Outcome, *, spec: RunSpec, store: Store, result: Result, metric_files: MetricFiles, group: Group
) -> tuple[End, str]:
    """Send the last metrics, put the result down, let the group go where the document says so, and tell people.

    The capacity changes only once the result is durable: nobody could tell the end from a loss otherwise. It does so before
    people are told, which takes a while where there are many nodes. Of several nodes that end the run at the same time the
    first one's result counts, for all of them, and that one tells.

    Returns:
        The end that counts, and what was done. Where nodes are kept, that is all so far (`trainrun.node.keep`).

    Raises:
        StoreError: the store did not take the result for 10 minutes.
        botocore.exceptions.BotoCoreError, ClientError: the group could not be looked at or scaled.
    """
    deadline = time.monotonic() + STORE_SECONDS
    while True:
        try:
            metric_files.send()
            end = result.write(outcome, shutdown=spec.shutdown, last_step=metric_files.last_step())
            break
        except (StoreError, BotoCoreError, ClientError):
            if time.monotonic() > deadline:
                raise
            log.exception("The result is not durable yet; trying again.")
            time.sleep(5.0)
    done, said = kept_text(end), ""
    try:
        if end.then == "scale_to_zero":
            group.scale_to_zero()
            done = "the group is scaled to zero"
    finally:
        if end.node == result.node:
            with _unhurried():
                said = _tell(end, spec=spec, store=store)
    return end, "; ".join([end.state, done, *([said] if said else [])])


def kept_text(end: End) -> str:
    """What whoever logs in to a kept node wants to know."""
    if end.keep_until is None:
        return "the group is kept until somebody ends it"
    return (
        f"the group is kept until {moment(end.keep_until)}, then it is scaled to zero; to keep it longer, on any node: "
        f"{keep_command(240)}"
    )


def asked_to_end(stop_file: Path) -> str:
    """Why a person has the whole run stop: the words of a stop file that begins with "end the run"; "" where they do not."""
    try:
        return asks_to_end(stop_file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""


@contextmanager
def _unhurried() -> Iterator[None]:
    """Finish a block when this node, whose group ends it, is shut down meanwhile; the request to stop holds afterwards.

    The service manager waits for as long as ranks may take to save.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if asked.is_set():
            signal.raise_signal(signal.SIGTERM)


def _tell(end: End, *, spec: RunSpec, store: Store) -> str:
    """Summary and message. Neither is worth an hour of nodes: what fails is a remark."""
    try:
        summary = summarize(store, end, run=spec.run)
        store.put(SUMMARY, json.dumps(summary, indent=1).encode())
    except StoreError as error:
        log.warning("There is no summary: %s", error)
        summary = {}
    return notify(end, spec=spec, store=store, summary=summary)
