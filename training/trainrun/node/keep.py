"""Keep the nodes of a run that has ended for looking at, and end them when the time is over.

Every node that is kept waits by itself, so that the loss of any, or a restart, changes nothing: when the time is over is in
result.json, and in keep.json when a person has said otherwise (``trainrun keep --minutes N``).
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import cache

from botocore.exceptions import BotoCoreError, ClientError

from trainrun.config import from_mapping
from trainrun.node.group import Group
from trainrun.node.result import KEY as RESULT
from trainrun.node.result import End
from trainrun.store import Store, StoreError, StoreKeyMissing

KEY = "keep.json"
POLL_SECONDS = 10.0

log = logging.getLogger(__name__)


def prolong(store: Store, *, until: float, by: str) -> End:
    """Have the nodes of a run that has ended kept until another moment.

    Args:
        store: the run's folder.
        until: seconds since the epoch; what has passed ends them now.
        by: who says so.

    Raises:
        ValueError: the run has not ended, or keeps nothing.
        StoreError: the store did not take it.
    """
    try:
        result = json.loads(store.get(RESULT))
    except StoreKeyMissing:
        raise ValueError(f"There is no {store.locate(RESULT)}: the run has not ended, and its nodes stay anyway.") from None
    if result.get("then") != "keep":
        raise ValueError(f"The run has {result['state']}, and its nodes are being ended. There is nothing to keep.")
    record = {"number": result["number"], "until": round(until, 3), "by": by, "time": round(time.time(), 3)}
    store.put(KEY, json.dumps(record).encode())
    return from_mapping(End, result, source=RESULT)


def kept_until(store: Store, end: End) -> float | None:
    """Until when the nodes are kept, in seconds since the epoch; None means until somebody ends them.

    A keep.json that says nothing of it, as one that a person wrote by hand, changes nothing.

    Raises:
        StoreError: the store did not answer.
    """
    try:
        data = store.get(KEY)
    except StoreKeyMissing:
        return end.keep_until
    try:
        word = json.loads(data)
        if word["number"] != end.number:
            return end.keep_until
        until = float(word["until"])
    except (ValueError, TypeError, KeyError):
        until = math.nan
    if math.isfinite(until):
        return until
    _beware(store.locate(KEY), data)
    return end.keep_until


@cache
def _beware(location: str, data: bytes) -> None:
    """Once, although it is looked at every few seconds."""
    log.warning('%s is passed over: it has no "number" and "until", seconds since the epoch, but %r', location, data[:200])


def carry_out(end: End, *, store: Store, group: Group) -> bool:
    """Do what becomes of the nodes at an end: scale the group to zero now, or when it has been kept for long enough.

    Any node may do it, and all do: the one that put the end down may be gone.

    Returns:
        As `keep`.
    """
    if end.then == "keep":
        return keep(end, store=store, group=group)
    view = group.look()
    if view is not None and view.desired:
        group.scale_to_zero()
    return True


def keep(end: End, *, store: Store, group: Group, poll: float = POLL_SECONDS, clock: Callable[[], float] = time.time) -> bool:
    """Wait until the time is over, then scale the group to zero.

    Returns:
        False when result.json is gone, or is of another end: a person has deleted it so that the run goes on.
    """
    until = end.keep_until
    while True:
        try:
            if _number(store) != end.number:
                return False
            until = kept_until(store, end)
        except StoreError as error:
            log.warning("Whether the nodes are kept longer cannot be asked: %s", error)
        if until is not None and clock() >= until:
            try:
                group.scale_to_zero()
                return True
            except (BotoCoreError, ClientError):
                log.exception("The group could not be scaled to zero; trying again.")
        time.sleep(poll)


def moment(epoch: float) -> str:
    """A time as people read it: "2026-12-24 11:30 UTC"."""
    return f"{datetime.fromtimestamp(epoch, timezone.utc):%Y-%m-%d %H:%M} UTC"


def _number(store: Store) -> int:
    try:
        return int(json.loads(store.get(RESULT))["number"])
    except (StoreKeyMissing, ValueError, TypeError, KeyError):
        return 0
