"""What the nodes tell each other of their ranks, so that a slow rank, or the one that others waited for, can be named."""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainrun import progress
from trainrun.node.events import Events
from trainrun.node.meet import Meeting
from trainrun.store import Store

WINDOW = 32
"""Steps of a rank of which the median counts: one slow step is no slow rank."""
FEWEST = 8
"""Steps that have to be seen of a rank before it is judged."""
SLOW = 1.5
"""By how many times a rank's median has to be that of all ranks."""
SLOW_SECONDS = 0.02
"""By how much it has to be longer: short steps differ by chance."""
SETTLE_SECONDS = 3.0
"""For all nodes to tell after a launch failed."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank, as its node tells of it."""

    rank: int
    step: int
    arrived: int
    phase: str
    seconds: float
    """Median over the last steps of the time until the rank came to where ranks wait for each other; 0 when unknown."""
    steps: int
    """Of how many steps."""


Everyone = dict[int, tuple[str, RankReport]]
"""All ranks by their number, each with its node."""


class Comparison:
    """Watches this node's ranks through one launch, and compares them with those of all nodes."""

    def __init__(self, *, state: Path, store: Store, node: str, meeting: Meeting, events: Events) -> None:
        """Args:
        state: $TRAINRUN_STATE.
        store: the run's folder; this node's report is progress/<generation>/<node>.json in it.
        node: this instance's id.
        meeting: what the nodes agreed on; its host compares.
        events: where findings are reported.
        """
        self._state, self._node, self._events = state, node, events
        self._store = store.child("progress").child(f"{meeting.claim.generation:08d}")
        self._compares = meeting.claim.node == node
        self._samples: dict[int, deque[float]] = {}
        self._last: dict[int, int] = {}
        self._named: set[int] = set()

    def sample(self) -> None:
        """Take note of the steps that the ranks have taken; not of each, where steps are shorter than looks."""
        for one in progress.read(self._state):
            if one.own_seconds and one.step != self._last.get(one.rank):
                self._last[one.rank] = one.step
                self._samples.setdefault(one.rank, deque(maxlen=WINDOW)).append(one.own_seconds)

    def tell_and_compare(self) -> None:
        """Tell the others of this node's ranks; on the host, look for slow ones among all.

        Raises:
            StoreError: the store did not answer.
        """
        reports = self._tell()
        if not self._compares or not reports:
            return
        everyone = self._everyone()
        for rank, (node, report) in slow_ranks(everyone).items():
            if rank not in self._named:
                self._named.add(rank)
                self._say(_slow(rank, node, report, usual=_usual(everyone)))

    def name_late(self) -> None:
        """After a launch failed: tell which ranks had not come to where the others waited, if some had not.

        Raises:
            StoreError: the store did not answer.
        """
        self._tell()
        if not self._compares:
            return
        time.sleep(SETTLE_SECONDS)
        everyone = self._everyone()
        if late := late_ranks(everyone):
            self._say(_late(late, everyone))

    def _say(self, text: str) -> None:
        self._events.report("recover", "done", detail=text)

    def _tell(self) -> list[RankReport]:
        reports = [self._report(one) for one in progress.read(self._state)]
        if reports:
            self._store.put(f"{self._node}.json", json.dumps([asdict(report) for report in reports]).encode())
        return reports

    def _report(self, one: progress.Progress) -> RankReport:
        samples = self._samples.get(one.rank, ())
        return RankReport(
            rank=one.rank,
            step=one.step,
            arrived=one.arrived,
            phase=one.phase,
            seconds=statistics.median(samples) if samples else 0.0,
            steps=len(samples),
        )

    def _everyone(self) -> Everyone:
        found: Everyone = {}
        for stored in self._store.list():
            for fields in json.loads(self._store.get(stored.key)):
                report = RankReport(**fields)
                found[report.rank] = (stored.key.removesuffix(".json"), report)
        return found


def slow_ranks(everyone: Everyone) -> Everyone:
    """Those that take much longer than the median rank until they wait for others."""
    judged = {rank: found for rank, found in everyone.items() if found[1].steps >= FEWEST}
    if len(judged) < 2 or len(judged) < len(everyone):
        return {}
    usual = _usual(judged)
    return {
        rank: found
        for rank, found in judged.items()
        if found[1].seconds > SLOW * usual and found[1].seconds - usual > SLOW_SECONDS
    }


def late_ranks(everyone: Everyone) -> Everyone:
    """Those that had not come to where at least half of the ranks waited."""
    if not everyone:
        return {}
    most = max(report.arrived for _, report in everyone.values())
    late = {rank: found for rank, found in everyone.items() if found[1].arrived < most}
    return late if len(late) <= len(everyone) / 2 else {}


def _slow(rank: int, node: str, report: RankReport, *, usual: float) -> str:
    return (
        f"Rank {rank} on {node} is slow: of each step it takes {report.seconds:.3g} s until it waits for others, "
        f"{report.seconds / usual:.1f} times the median of all ranks ({usual:.3g} s). Is its accelerator throttled, does "
        "something else run there, or does it read its data more slowly?"
    )


def _late(late: Everyone, everyone: Everyone) -> str:
    names = ", ".join(f"rank {rank} on {node} (step {report.arrived})" for rank, (node, report) in sorted(late.items()))
    most = max(report.arrived for _, report in everyone.values())
    return (
        f"When the ranks failed, {len(everyone) - len(late)} of {len(everyone)} waited at step {most} for {names}: "
        "look there first."
    )


def _usual(everyone: Everyone) -> float:
    """The median of all ranks; of two, the faster's."""
    seconds: Sequence[float] = sorted(report.seconds for _, report in everyone.values())
    return seconds[(len(seconds) - 1) // 2]
