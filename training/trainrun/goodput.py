"""Where a run's time went: how much of it trained, and what each loss cost.

Read from the run's folder alone: what its nodes reported step by step (``nodes/``) and the metric lines of its ranks
(``metrics/``). Each moment between the first report and the last belongs to exactly one `Cause`, so that the causes add up to
the wall time. docs/recovery.md has the definitions.

The term is that of Google's ML goodput measurement: time spent on steps that count, over the time that was paid for.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, get_args

from trainrun.parallel import in_threads
from trainrun.store import Store

Cause = Literal[
    "productive",
    "data_wait",
    "checkpoint_stall",
    "repeated",
    "boot",
    "waiting_for_nodes",
    "starting",
    "restart_after_crash",
    "restart_after_agent_crash",
    "restart_after_hang",
    "restart_after_notice",
    "restart_after_node_loss",
    "restart_after_failed_check",
    "restart_after_unknown",
    "untold",
    "ending",
]
"""What a moment of a run was spent on. "untold" is a launch whose ranks write no metric lines."""

CAUSES: tuple[Cause, ...] = get_args(Cause)
SEEN_SECONDS = 120.0
"""A node that reported so shortly before the end is taken to have been there until then."""
NOTICE_SECONDS = 120.0
"""Of a notice to a node and the end of its launch: EC2 gives so long before it takes a Spot instance."""
THREADS = 8

Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Where the time of one start of a run went."""

    since: float
    """The first report of a node, in seconds since the epoch."""
    until: float
    """The last report, or metric line."""
    seconds: dict[Cause, float]
    """Of each cause; they add up to the wall time."""
    steps: int
    """Steps of the final history that were taken here."""
    repeated_steps: int
    """Steps that were logged and had to be taken again."""
    restarts: int
    node_hours: float
    """Of all nodes together, each from its first report to its last sign of life."""

    @property
    def wall_seconds(self) -> float:
        """From the first report to the last."""
        return self.until - self.since

    @property
    def goodput(self) -> float | None:
        """Productive over wall time, from 0 to 1; None where no rank told of its steps."""
        if not self.wall_seconds or not (self.steps or self.repeated_steps):
            return None
        return self.seconds["productive"] / self.wall_seconds

    def to_mapping(self) -> dict[str, Any]:
        """What JSON takes; causes of no time are left out."""
        found = asdict(self)
        spent = {cause: round(seconds, 3) for cause, seconds in self.seconds.items() if seconds}
        return {**found, "wall_seconds": self.wall_seconds, "goodput": self.goodput, "seconds": spent}


@dataclass(frozen=True)
class Span:
    """A time that was spent on one thing."""

    begin: float
    end: float
    cause: Cause


@dataclass(frozen=True)
class _Session:
    """One launch's metric lines, by rank 0."""

    lines: tuple[Line, ...]
    from_step: int
    """The last step that was done before."""

    @property
    def begin(self) -> float:
        return float(self.lines[0]["time"])

    @property
    def end(self) -> float:
        return float(self.lines[-1]["time"])

    @property
    def last_step(self) -> int:
        """The last that is known to be done: lines of events tell of it, too."""
        return max(self.from_step, *(int(line["step"]) for line in self.lines))

    @property
    def has_ended(self) -> bool:
        """Whether its loop came to its end."""
        return any(line.get("event") in ("finished", "stopped") for line in self.lines)


def of(store: Store) -> Goodput | None:
    """Where the time of a run's last start went; None when no node has reported yet.

    Args:
        store: the run's folder.

    Raises:
        StoreError: the store did not answer.
    """
    since = _last_start(store)
    events = sorted((line for line in _read(store, "nodes/") if line["time"] > since), key=_time)
    if not events:
        return None
    alive = {one.key.rpartition("/")[2].removesuffix(".json"): one.modified for one in store.list("progress/")}
    return account(events, [line for line in _read(store, "metrics/") if line["time"] > since], alive=alive)


def account(events: Sequence[Line], metrics: Sequence[Line], *, alive: Mapping[str, float] | None = None) -> Goodput:
    """Where the time went.

    Args:
        events: what the nodes reported, of one start of the run; at least one.
        metrics: lines of the ranks' metrics, each with "source", which tells the launches apart.
        alive: when each node that tells of its ranks last did, besides its events.
    """
    events = sorted(events, key=_time)
    sessions = _sessions(metrics)
    since = _time(events[0])
    until = max(_time(events[-1]), *(session.end for session in sessions), since)
    spans = list(_spans(events, sessions, since=since, until=until))
    seconds: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
    for span in spans:
        seconds[span.cause] += span.end - span.begin
    kept = _kept(sessions)
    return Goodput(
        since=since,
        until=until,
        seconds=seconds,
        steps=sessions[-1].last_step - min(one.from_step for one in sessions) if sessions else 0,
        repeated_steps=sum(max(0, one.last_step - max(last, one.from_step)) for one, last in zip(sessions, kept, strict=True)),
        restarts=max(0, len(sessions) - 1),
        node_hours=_node_seconds(events, alive or {}, until=until) / 3600.0,
    )


def _spans(events: Sequence[Line], sessions: Sequence[_Session], *, since: float, until: float) -> Iterator[Span]:
    """All of the time in order, without gaps. Clocks of nodes differ: what would overlap begins later."""
    at = since
    cause: Cause = "starting"
    for number, (session, last) in enumerate(zip(sessions, _kept(sessions), strict=True)):
        begin = max(at, session.begin)
        if number:
            cause = _restart_cause(events, sessions[:number], until=begin)
        yield from _outside(events, at, begin, cause)
        at = begin
        for span in _inside(session, last, cause):
            if span.end > at:
                yield Span(max(at, span.begin), span.end, span.cause)
                at = span.end
    yield from _rest(events, sessions, at, until)


def _rest(events: Sequence[Line], sessions: Sequence[_Session], at: float, until: float) -> Iterator[Span]:
    """What follows the last metric line."""
    if at >= until:
        return
    if not sessions:
        yield from _outside(events, at, until, "untold")
    elif sessions[-1].has_ended or _has_ended(events, at):
        yield Span(at, until, "ending")
    else:
        yield from _outside(events, at, until, _restart_cause(events, sessions, until=until))


def _has_ended(events: Sequence[Line], at: float) -> bool:
    """Whether the job ended well after a moment."""
    return any(_time(line) >= at and _is(line, "train", "done") and line["detail"] == "the job is done" for line in events)


def _outside(events: Sequence[Line], begin: float, end: float, cause: Cause) -> Iterator[Span]:
    """A time without steps: boot before any node meets, waiting while no node is further than that, or else ``cause``."""
    if end <= begin:
        return
    doing: dict[str, str] = {}
    has_met = False
    at = begin
    last = {line["node"]: _time(line) for line in events}
    for line in events:
        moment = min(max(_time(line), begin), end)
        if moment > at:
            yield Span(at, moment, _cause_of(doing, has_met, cause))
            at = moment
        if _time(line) > end:
            break
        has_met = has_met or line["step"] == "meet"
        if last[line["node"]] < begin:
            continue  # it is gone, and does nothing
        if line["state"] == "started":
            doing[line["node"]] = line["step"]
        elif doing.get(line["node"]) == line["step"] and line["step"] != "meet":
            doing.pop(line["node"])  # a node that has met goes on at once
    if end > at:
        yield Span(at, end, _cause_of(doing, has_met, cause))


def _cause_of(doing: Mapping[str, str], has_met: bool, cause: Cause) -> Cause:
    if not has_met:
        return "boot"
    if doing and "train" not in doing.values() and "meet" in doing.values():
        return "waiting_for_nodes"
    if cause == "untold" and "train" not in doing.values():
        return "starting"
    return cause


def _inside(session: _Session, kept: int, begun_by: Cause) -> Iterator[Span]:
    """The time between a launch's first metric line and its last.

    Args:
        session: the launch.
        kept: the last of its steps that belongs to the final history.
        begun_by: why it was begun, which also pays for what its first step takes longer than those after it.
    """
    paces = [float(line["seconds_per_step"]) for line in session.lines if _is_step(line) and line.get("seconds_per_step")]
    step, stall, at = session.from_step, 0.0, session.begin
    for line in session.lines:
        stall += float(line.get("stall_seconds") or 0.0)
        if not _is_step(line):
            continue
        end, steps = _time(line), int(line["step"]) - step
        if end > at and steps > 0:
            if step == session.from_step and len(paces) > 1:
                trained = min(end - at, steps * paces[1])
                yield Span(at, end - trained, begun_by)
                at = end - trained
            good = min(1.0, max(0, kept - step) / steps)
            yield from _trained(at, end, good=good, wait=float(line.get("data_wait") or 0.0), stall=stall)
            at, stall = end, 0.0
        step = max(step, int(line["step"]))
    if session.end > at:  # saving, evaluating and the like, after the last step that was logged
        stalled = min(stall, session.end - at)
        yield Span(at, at + stalled, "checkpoint_stall")
        cause: Cause = "ending" if session.has_ended else "productive"  # steps that were not logged
        yield Span(at + stalled, session.end, cause if kept >= session.last_step else "repeated")


def _trained(begin: float, end: float, *, good: float, wait: float, stall: float) -> Iterator[Span]:
    """A time in which steps were taken, of which the part ``good`` counts; within it the order is of no importance."""
    middle = begin + (end - begin) * good
    waited = min(1.0, max(0.0, wait)) * (middle - begin)
    stalled = min(stall, middle - begin - waited)
    first, second = begin + waited, begin + waited + stalled
    yield Span(begin, first, "data_wait")
    yield Span(first, second, "checkpoint_stall")
    yield Span(second, middle, "productive")
    yield Span(middle, end, "repeated")


def _restart_cause(events: Sequence[Line], before: Sequence[_Session], *, until: float) -> Cause:
    """Why training stood still from the end of a launch until a moment, by what the nodes said meanwhile.

    Args:
        events: what the nodes reported.
        before: the launches until then.
        until: the moment.
    """
    since = before[-1].end
    within = [line for line in events if since - 1.0 <= _time(line) <= until]
    failures = "\n".join(str(line["detail"]) for line in within if _is(line, "train", "failed"))
    if "made no progress" in failures:
        return "restart_after_hang"
    if "saved and left" in failures or any(_leaves(line) for line in events if since - NOTICE_SECONDS <= _time(line) <= until):
        return "restart_after_notice"
    if _lost(events, after=before[-2].end if len(before) > 1 else 0.0, since=since, until=until):
        return "restart_after_node_loss"
    if any(_is(line, "check", "failed") for line in within):
        return "restart_after_failed_check"
    if any(_begins_anew(events, line) for line in within):
        return "restart_after_agent_crash"
    if "rendezvous host" in failures:
        return "restart_after_node_loss"
    return "restart_after_crash" if "ended with exit code" in failures else "restart_after_unknown"


def _leaves(line: Line) -> bool:
    """Whether a node says that it was given notice, or leaves upon one."""
    if line["step"] == "watch":
        return "asked to save within" in str(line["detail"])
    return _is(line, "train", "done") and str(line["detail"]).startswith("Asked to stop")


def _lost(events: Sequence[Line], *, after: float, since: float, until: float) -> bool:
    """Whether a node of the launch before was never heard of again, though others were."""
    last = {line["node"]: line for line in events}
    gone = [line for line in last.values() if _is(line, "train", "started") and after < _time(line) <= since + 1.0]
    return bool(gone) and any(since <= _time(line) <= until for line in events)


def _begins_anew(events: Sequence[Line], line: Line) -> bool:
    """Whether an agent begins where the one before it had been training: it was killed."""
    if not _is(line, "prepare", "started"):
        return False
    before = [other for other in events if other["node"] == line["node"] and _time(other) < _time(line)]
    return bool(before) and _is(before[-1], "train", "started")


def _sessions(metrics: Sequence[Line]) -> list[_Session]:
    """The launches in order of time."""
    by_source: dict[str, list[Line]] = defaultdict(list)
    for line in sorted(metrics, key=_time):
        if _is_step(line) or "event" in line:
            by_source[str(line.get("source", ""))].append(line)
    found = []
    for lines in by_source.values():
        begun = next((int(line["step"]) for line in lines if line.get("event") in ("started", "resumed")), None)
        first = next((int(line["step"]) - 1 for line in lines if _is_step(line)), 0)
        found.append(_Session(tuple(lines), first if begun is None else begun))
    return sorted(found, key=lambda session: session.begin)


def _kept(sessions: Sequence[_Session]) -> list[int]:
    """Of each launch the last step that no later one has taken again."""
    kept, lowest = [], max((session.last_step for session in sessions), default=0)
    for session in reversed(sessions):
        kept.append(min(lowest, session.last_step))
        lowest = min(lowest, session.from_step)
    return kept[::-1]


def _node_seconds(events: Sequence[Line], alive: Mapping[str, float], *, until: float) -> float:
    """Seconds of all nodes. Where nodes tell of their ranks, one that has fallen silent is gone; else it is not known."""
    first: dict[str, float] = {}
    last: dict[str, Line] = {}
    for line in events:
        first.setdefault(line["node"], _time(line))
        last[line["node"]] = line
    total = 0.0
    for node, line in last.items():
        seen = max(_time(line), alive.get(node, 0.0))
        works = line["state"] == "started" or _is(line, "meet", "done")
        there = works and (not alive or seen > until - SEEN_SECONDS)
        total += (until if there else min(seen, until)) - first[node]
    return total


def _last_start(store: Store) -> float:
    """When the run had ended before its last start, in seconds since the epoch; 0 when it had not."""
    ends = [float(json.loads(store.get(one.key))["time"]) for one in store.list("ends/")]
    if not ends:
        return 0.0
    starts = [line["time"] for line in _read(store, "nodes/") if _is(line, "prepare", "started")]
    return max((end for end in ends if any(start > end for start in starts)), default=0.0)


def _read(store: Store, prefix: str) -> list[Line]:
    """All lines of the files under a prefix; of metric files, each with the launch that it comes from."""
    keys = [one.key for one in store.list(prefix) if one.key.endswith(".jsonl")]
    found: dict[str, bytes] = {}

    def read(key: str) -> None:
        found[key] = store.get(key)

    in_threads([partial(read, key) for key in keys], THREADS)
    return [line for key in sorted(found) for line in _lines(found[key], source=key.rpartition("-")[0])]


def _lines(data: bytes, *, source: str) -> Iterable[Line]:
    for text in data.splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # the line that is being written
            continue
        if isinstance(line, dict) and isinstance(line.get("time"), (int, float)):
            yield {**line, "source": source}


def _is_step(line: Line) -> bool:
    return "event" not in line and isinstance(line.get("step"), int)


def _is(line: Line, step: str, state: str) -> bool:
    return bool(line["step"] == step and line["state"] == state)


def _time(line: Line) -> float:
    return float(line["time"])
