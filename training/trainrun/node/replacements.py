"""Nodes that do not pass their checks are replaced, but not without end: what all nodes of a run have used up of it.

A record for each such node is put in the run's folder: ``replacements/<instance>.json``. Each node puts down its own before it
counts, so that of several that fail at once none is missed; they may then count one another, and end the run a little early.
A node that cannot reach the run's folder cannot count, and so is not replaced: it tells why on its console and is looked at
again, for ever. A store that does not answer is no fault of a node, and is never counted.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from trainrun.node.group import Group
from trainrun.node.host import has_own_kernel
from trainrun.node.outcome import AGAIN, DO_NOT_RESTART, Outcome
from trainrun.node.places import Places
from trainrun.store import Store, StoreError
from trainrun.words import counted

WINDOW_SECONDS = 24 * 3600.0
SHOWN = 3
"""Failures that the run's result quotes; the others are in the records."""
SHOWN_CHARACTERS = 500
REQUEST_SECONDS = 300.0
"""For the group to take word that this node is to be replaced."""
RETRY_SECONDS = 5.0
COUNT_SECONDS = 600.0
"""For the store to take the record of an unfit node, before the node is looked at anew."""
LONGEST_PAUSE_SECONDS = 60.0
BUSY = ("Throttling", "ThrottlingException", "RequestLimitExceeded", "ResourceContention")
"""Refusals that pass."""
CONSOLE = Path("/dev/console")
"""EC2 keeps what is written there, and shows it as the instance's system log."""

log = logging.getLogger(__name__)


class Replacements:
    """The budget of one run."""

    def __init__(self, *, store: Store, allowed: int) -> None:
        """Args:
        store: the run's folder.
        allowed: `ShutdownSpec.max_replacements`.
        """
        self._store = store.child("replacements")
        self._allowed = allowed

    def spent(self, *, node: str, reason: str) -> str:
        """Count this node, which is unfit. Returns "" if it may be replaced, or why the run ends instead.

        The times are the store's: the clock may be what is wrong with the node.

        Raises:
            StoreError: it cannot be counted.
        """
        record = {"node": node, "time": round(time.time(), 3), "reason": reason}
        self._store.put(f"{node}.json", json.dumps(record).encode())
        found = {one.key: one.modified for one in self._store.list()}
        now = found[f"{node}.json"]
        recent = sorted((key for key, when in found.items() if when > now - WINDOW_SECONDS), key=lambda key: found[key])
        if len(recent) <= self._allowed:
            return ""
        return (
            f"{counted(len(recent), 'node')} in 24 hours did not pass their checks, and {self._allowed} may be replaced "
            f"(shutdown.max_replacements). The last of them:\n{self._quoted(recent[-SHOWN:])}\n"
            f"Mend what they name. To start again before the day is over, delete {self._store.url}/ or allow more."
        )

    def _quoted(self, keys: list[str]) -> str:
        records = [json.loads(self._store.get(key)) for key in keys]
        return "\n".join(f"{one['node']}: {one['reason'][:SHOWN_CHARACTERS]}" for one in records)


def replace_or_end(reason: str, *, node: str, replacements: Replacements, group: Group, places: Places) -> Outcome | int:
    """Have an unfit node replaced as long as the budget lasts.

    Args:
        reason: what is wrong with it.
        node: its instance id.
        replacements: the run's budget.
        group: the node's.
        places: where things are on this node.

    Returns:
        How the run ends, when the budget is spent; else the agent's exit code: AGAIN where the store takes no record.
    """
    spent = _count(replacements, node=node, reason=reason, places=places)
    if spent is None:
        return AGAIN
    if spent:
        return Outcome(state="failed", reason=spent)
    give_up = time.monotonic() + REQUEST_SECONDS
    while True:
        try:
            group.replace_me(reason)
        except (BotoCoreError, ClientError) as error:
            if _is_final(error) or time.monotonic() > give_up:
                tell_console(f"{node} is not fit and stays, because its group does not hear it: {error}\n{reason}", places=places)
                return DO_NOT_RESTART
            log.exception("The group could not be told to replace this node; trying again.")
            time.sleep(RETRY_SECONDS)
        else:
            return DO_NOT_RESTART


def _count(replacements: Replacements, *, node: str, reason: str, places: Places) -> str | None:
    """What `Replacements.spent` says; None when the store has not answered for long."""
    give_up, pause = time.monotonic() + COUNT_SECONDS, RETRY_SECONDS
    while True:
        try:
            return replacements.spent(node=node, reason=reason)
        except StoreError as error:
            if pause == RETRY_SECONDS:
                text = f"{node} is not fit and not replaced yet, because it cannot count itself: {error}\n{reason}"
                tell_console(text, places=places)
            if time.monotonic() > give_up:
                log.error("%s cannot count itself: %s The node is looked at anew.", node, error)
                return None
            log.warning("%s cannot count itself, trying again in %g s: %s", node, pause, error)
            time.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)


def _is_final(error: BotoCoreError | ClientError) -> bool:
    """Whether another try would be refused likewise: there is no such right, or the instance is in no group."""
    if not isinstance(error, ClientError):
        return False
    status = error.response["ResponseMetadata"]["HTTPStatusCode"]
    return 400 <= status < 500 and error.response["Error"]["Code"] not in BUSY


def tell_console(text: str, *, places: Places) -> None:
    """Tell who looks at EC2's system log of the instance. A node that shares its machine's kernel has no console of its own."""
    log.error("%s", text)
    if has_own_kernel(places):
        try:
            with CONSOLE.open("w", encoding="utf-8") as console:
                console.write(f"traincluster: {text}\n")
        except OSError:
            log.exception("There is no console.")
