"""What one rank does of a save, beside its training: it has its share copied, hands it to its writer, and hears of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainrun.checkpoint.arena import Arena
from trainrun.checkpoint.layout import shard_key
from trainrun.checkpoint.parts import Part
from trainrun.checkpoint.process import WriterEnded, WriterProcess
from trainrun.checkpoint.snapshot import Copy, targets
from trainrun.checkpoint.write import Plan, Values
from trainrun.config import ConfigError
from trainrun.memory import readable_size
from trainrun.ranks import Ranks
from trainrun.store import Store

GRACE_SECONDS = 2.0
"""By which a writer may be late before it is taken to hang: it has a deadline itself, and says what it was doing."""

PRUNE_SECONDS = 60.0
"""How long the end of a run waits for the deletion of old checkpoints."""

NAMED = 3
"""Tensors that a message names at most."""


class Share:
    """One rank's share of the save under way, or of the last one.

    Attributes:
        busy: whether the writer is at work, so that no snapshot may overwrite the arena.
        problem: what has failed of it here; None while nothing has.
        hopeless: whether no further save can succeed either, because the state itself cannot be saved.
        committed: the answer to `commit`: bytes of all shards, and whether it was this attempt that came first.
        pruning: whether the writer deletes old checkpoints.
        seconds: what the last save took by itself, from the beginning of the copying; on rank 0 with its commit.
    """

    def __init__(self, ranks: Ranks, store: Store) -> None:
        self._ranks, self._store = ranks, store
        self.busy = False
        self.problem: str | None = None
        self.hopeless = False
        self.committed: tuple[int, bool] = (0, True)
        self.pruning = False
        self.seconds = 0.0
        self._writer: WriterProcess | None = None
        self._arena: Arena | None = None
        self._plan = Plan((), 0)
        self._targets: list[Tensor] = []
        self._copy: Copy | None = None
        self._thread: threading.Thread | None = None
        self._lost: Exception | None = None
        self._doing = ""
        self._moved = 0
        self._started = self._deadline = 0.0
        self._hurried = False

    # A save

    def begin(self, take: Callable[[], tuple[list[Part], Values]], *, step: int, attempt: str, seconds: float) -> None:
        """Start to copy and to write what ``take`` gives; whatever fails is the `problem`.

        Args:
            take: makes this rank's parts and values. Until `before_update` only the user's own code may change the parts.
            step: that is saved.
            attempt: the save's own id, the same on all ranks.
            seconds: after which it has failed.
        """
        assert not self.busy
        if self._thread is not None:
            self._thread.join()
        begun = time.time()  # by the writer's clock, for it is this machine's too
        key = shard_key(step, attempt, self._ranks.rank)
        self.problem, self._lost, self._moved = None, None, 0
        self._begin_work(f"writing {self._store.locate(key)}", seconds)
        try:
            writer = self._living_writer()
            parts, values = take()
            copy = Copy(parts, self._ranks.device, threads=torch.get_num_threads())
        except Exception as error:  # whatever it is, the other ranks are to hear of it
            self.hopeless = isinstance(error, ConfigError)
            self._end_work(str(error) if self.hopeless else f"{type(error).__name__}: {error}")
            return
        request = {"do": "save", "step": step, "attempt": attempt, "rank": self._ranks.rank, "values": dict(values)}
        request |= {"begun": begun}
        self._copy = copy
        self._thread = threading.Thread(target=partial(self._hand_over, copy, writer, request), daemon=True)
        self._thread.start()

    def before_update(self) -> None:
        """Call it before the optimizer may touch what is copied: that comes after the copying then."""
        if self._copy is None:
            return
        copy, self._copy = self._copy, None
        copy.before_update()
        if names := copy.changed():
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            self.problem = self.problem or (
                f"{', '.join(names[:NAMED])}{more} changed between state.save() and the next run.step(), while they were "
                "copied. Change weights and optimizer state before state.save()"
            )

    def commit(self, header: dict[str, Any], settings: dict[str, Any], *, seconds: float) -> None:
        """On rank 0, when the shards of all ranks are there: start to make them a checkpoint."""
        self._begin_work(f"committing step {header['step']}", seconds)
        try:
            if self._writer is None:
                raise WriterEnded("there is no writer")
            request = {"do": "commit", "location": self._store.url, "header": header, "settings": settings, "seconds": seconds}
            self._writer.ask(request, seconds=GRACE_SECONDS)
        except WriterEnded as error:
            self._give_up(str(error))

    def poll(self) -> None:
        """Hear what the writer has said, without waiting."""
        if not self.busy and not self.pruning:
            return
        if self.busy and self._thread is not None and self._thread.is_alive():
            if time.monotonic() > self._deadline:
                self._give_up("its writer does not take the snapshot")
            return
        if self.busy and self._lost is not None:
            self._give_up(str(self._lost))
            return
        assert self._writer is not None
        try:
            for answer in self._writer.answers():
                self._hear(answer)
        except WriterEnded as error:
            self._give_up(str(error))
            return
        if self.busy and time.monotonic() > self._deadline:
            after = f"it was not done after {time.monotonic() - self._started:.1f} s"
            sent = f"with {readable_size(self._moved)} of {readable_size(self._plan.size)} sent"
            hangs = f"its writer (process {self._writer.pid}) hangs: {after} and did not say why, {sent}"
            self._give_up(f"{after}, when the run had to end, {sent}" if self._hurried else hangs)

    def wait(self, seconds: float) -> None:
        """Until the writer is done with its present task, its time is over, or so many seconds are."""
        deadline = time.monotonic() + seconds
        while True:
            self.poll()
            left = deadline - time.monotonic()
            if not self.busy or left <= 0:
                return
            if self._thread is not None and self._thread.is_alive():
                self._thread.join(left)
            elif self._writer is not None:
                self._writer.wait(left)

    def wait_for_pruning(self) -> None:
        """Until old checkpoints are deleted, or `PRUNE_SECONDS` are over: the next run goes on."""
        deadline = time.monotonic() + PRUNE_SECONDS
        while self.pruning and self._writer is not None and time.monotonic() < deadline:
            self._writer.wait(deadline - time.monotonic())
            self.poll()

    def hurry(self, seconds: float) -> None:
        """Let the present task have no more than so long from now on."""
        deadline = time.monotonic() + seconds
        if deadline < self._deadline:
            self._deadline, self._hurried = deadline, True

    def close(self) -> None:
        """Leave no process and no memory behind; a save under way is abandoned."""
        self._drop_writer()
        self._plan, self._arena, self._targets, self._copy, self._thread = Plan((), 0), None, [], None, None
        self.busy = False

    # In the background

    def _hand_over(self, copy: Copy, writer: WriterProcess, request: dict[str, Any]) -> None:
        def left() -> float:
            return self._deadline - GRACE_SECONDS - time.monotonic()

        try:
            copy.run(partial(self._places, copy.parts))
            assert self._arena is not None
            if writer.plan is not self._plan:
                plan = {"do": "plan", "size": self._plan.size, "slots": self._plan.slots}
                writer.ask(plan, descriptors=[self._arena.descriptor], seconds=left())
                writer.plan = self._plan
            writer.ask({**request, "location": self._store.url, "seconds": left()}, seconds=left())
        except Exception as error:
            self._lost = error

    def _places(self, parts: Sequence[Part]) -> list[Tensor]:
        """Where the parts belong in the arena. Plan and arena are made anew only when the parts are others than before."""
        plan = Plan.of(parts)
        if self._arena is None or plan != self._plan:
            if self._arena is None or self._arena.size < plan.size:
                self._arena, self._targets = None, []  # first, or there would be both
                self._arena = Arena(plan.size, self._ranks.device)
            self._plan, self._targets = plan, targets(parts, plan, self._arena.bytes)
        return self._targets

    # The writer

    def _living_writer(self) -> WriterProcess:
        if self._writer is not None:
            try:
                for answer in self._writer.answers():
                    self._hear(answer)
            except WriterEnded:
                self._drop_writer()
        if self._writer is None:
            self._writer = WriterProcess()
        return self._writer

    def _hear(self, answer: dict[str, Any]) -> None:
        if "moved" in answer:
            self._moved = max(self._moved, answer["moved"])
        elif "pruned" in answer:
            self.pruning = False
            if answer["pruned"]:
                self._ranks.say(f"WARNING: old checkpoints could not be deleted: {answer['pruned']}")
        elif "failed" in answer:
            self._end_work(answer["failed"])
        else:
            if "saved" in answer:
                self.seconds = answer["seconds"]
            if "committed" in answer:
                self.seconds += answer["seconds"]
                self.committed, self.pruning = (answer["committed"], answer["own"]), True
            self._end_work(None)

    def _begin_work(self, doing: str, seconds: float) -> None:
        self.busy, self._doing, self._started = True, doing, time.monotonic()
        self._deadline, self._hurried = self._started + seconds + GRACE_SECONDS, False

    def _end_work(self, problem: str | None) -> None:
        self.busy, self.problem = False, self.problem or problem

    def _give_up(self, reason: str) -> None:
        """The writer is of no use any more, and another one is started for the next save."""
        self._drop_writer()
        if self.busy:
            self._end_work(f"{reason}, while {self._doing}")

    def _drop_writer(self) -> None:
        if self._writer is not None:
            self._writer.end()
            if self._thread is not None:
                self._thread.join()  # it may use the connection
            self._writer.close()
        self._writer, self.pruning = None, False
