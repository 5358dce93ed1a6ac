"""The end of a run: one record, which all nodes agree on, whichever of them writes it.

    result.json            the last end of the run
    ends/000001.json       each end, by number; written only where there is none, so that of several nodes the first counts

A run of the same name may be started again: with another document, by new nodes, or by a person who deletes result.json. So a
record ends the run only for those that it is meant for: the nodes that took part in it, and those that come to them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass

from trainrun.config import ConfigError, from_mapping
from trainrun.node.outcome import Outcome
from trainrun.spec import RunSpec, ShutdownSpec
from trainrun.store import Store, StoreKeyMissing

KEY = "result.json"
FOLDER = "ends"


@dataclass(frozen=True, kw_only=True)
class End:
    """One end of a run."""

    state: str
    """"succeeded", "failed" or "stopped"."""
    reason: str
    time: float
    """Seconds since the epoch."""
    node: str
    """Who put it down."""
    step: int = 0
    """The last step that was logged; 0 when none was."""
    steps: int = 0
    """Of how many."""
    number: int = 1
    """Of the run's ends, from 1."""
    nodes: tuple[str, ...] = ()
    """Whose end it is: the nodes that were in the group."""
    document: str = ""
    """Digest of the RunSpec."""
    then: str = "scale_to_zero"
    """What becomes of the nodes: "scale_to_zero" or "keep"."""
    keep_until: float | None = None
    """For "keep": when they are ended after all, in seconds since the epoch; None means by hand only."""

    def __str__(self) -> str:
        return f"The run has {self.state}, says {self.node}: {self.reason}"

    def to_json(self) -> bytes:
        """The record as it is stored."""
        return json.dumps(asdict(self)).encode()


def digest(spec: RunSpec) -> str:
    """What tells one document from another."""
    return hashlib.sha256(spec.to_json().encode()).hexdigest()[:16]


class Result:
    """The run's result, as far as it belongs to this start of the run."""

    def __init__(
        self, *, store: Store, node: str, document: str, members: Callable[[], Collection[str]], seen: int | None = None
    ) -> None:
        """Args:
        store: the run's folder.
        node: this node.
        document: digest of the RunSpec that it runs.
        members: the nodes that are in the group, this one perhaps not yet.
        seen: number of the newest end when this node's agent started; None means that the first question finds it out.
        """
        self.node = node
        self._store, self._document, self._members = store, document, members
        self._seen = seen

    def end(self) -> End | None:
        """The end of this start of the run, if it has come.

        It is meant for this node if it names it, or any other that is in the group still: a node that comes in place of one
        that is kept joins an end, and nodes of which none took part in it begin anew.

        Raises:
            StoreError: the store did not answer.
            botocore.exceptions.BotoCoreError, ClientError: Auto Scaling did not.
        """
        if self._seen is None:
            self._seen = self._newest()
        end = self._read(KEY)
        if end is None or end.document != self._document:
            return None
        if self.node in end.nodes or set(end.nodes) & set(self._members()):
            return end
        return None

    def ended(self) -> str:
        """Why the run is over, or "". Raises as `end`."""
        end = self.end()
        return "" if end is None else str(end)

    def broken(self) -> str:
        """Why the run is over for want of success, or "": what has succeeded elsewhere may be about to here. Raises as `end`."""
        end = self.end()
        return "" if end is None or end.state == "succeeded" else str(end)

    def write(self, outcome: Outcome, *, shutdown: ShutdownSpec, last_step: tuple[int, int] | None) -> End:
        """Put the end down, unless another node has. Returns the one that counts.

        Raises:
            StoreError: the store did not take it.
            botocore.exceptions.BotoCoreError, ClientError: Auto Scaling did not answer.
        """
        end = self.end() or self._claimed() or self._claim(outcome, shutdown, last_step)
        self._store.put(KEY, end.to_json())  # again, where another claimed it: it may have been lost in between
        return end

    def _claimed(self) -> End | None:
        """An end that another node has claimed since this one's agent started, and maybe not put into result.json yet.

        By its number: the clocks of nodes may differ.
        """
        newest = self._newest()
        end = self._read(f"{FOLDER}/{newest:06}.json") if newest > (self._seen or 0) else None
        return end if end is not None and end.document == self._document else None

    def _claim(self, outcome: Outcome, shutdown: ShutdownSpec, last_step: tuple[int, int] | None) -> End:
        step, steps = last_step or (0, 0)
        now = round(time.time(), 3)
        wishes = {"succeeded": shutdown.on_success, "failed": shutdown.on_failure, "stopped": "scale_to_zero"}
        then = wishes[outcome.state]
        keeps = then == "keep" and shutdown.keep_minutes is not None
        end = End(
            state=outcome.state,
            reason=outcome.reason,
            time=now,
            node=self.node,
            step=step,
            steps=steps,
            number=self._newest() + 1,
            nodes=tuple(sorted({self.node, *self._members()})),
            document=self._document,
            then=then,
            keep_until=now + 60.0 * (shutdown.keep_minutes or 0) if keeps else None,
        )
        key = f"{FOLDER}/{end.number:06}.json"
        if self._store.put_new(key, end.to_json()):
            return end
        return self._read(key) or end

    def _newest(self) -> int:
        names = [one.key.rpartition("/")[2].removesuffix(".json") for one in self._store.list(f"{FOLDER}/")]
        return max((int(name) for name in names if name.isdigit()), default=0)

    def _read(self, key: str) -> End | None:
        """The record, or None where there is none, or one of another version of trainrun, which says nothing of this start."""
        try:
            return from_mapping(End, json.loads(self._store.get(key)), source=key)
        except (StoreKeyMissing, ConfigError, ValueError):
            return None
