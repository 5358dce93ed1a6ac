"""Saves as all ranks agree on them: begun at the same step, and committed, or failed, at the same step.

A save goes on beside training. Its ranks tell each other how it goes by numbers that ride on an all-reduce which each step
makes anyway (`trainrun.agreement`): whether someone is busy with it, and whether it has failed for someone. When nobody is
busy any more, all ranks do the same at the same step: they have rank 0 commit, or they take note of the commit, or they
gather what has failed. Nobody ever waits for a store in a training step, but for the one that would overtake the save under
way: there is one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from trainrun.checkpoint.layout import new_attempt
from trainrun.checkpoint.parts import Part
from trainrun.checkpoint.share import Share
from trainrun.checkpoint.write import Values
from trainrun.config import to_mapping
from trainrun.deadline import EXIT_SECONDS
from trainrun.errors import CheckpointError
from trainrun.ranks import Ranks
from trainrun.settings.checkpoint import CheckpointSettings
from trainrun.stop import StopFlag
from trainrun.store import Store

TICK_SECONDS = 0.5
"""Between two times that ranks which wait for a save tell each other whether they were asked to stop."""

Event = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a committed save took."""

    step: int
    bytes: int
    """Of all shards; known to rank 0 only, 0 elsewhere."""
    seconds: float
    """From its beginning until its commit was known."""
    stall_seconds: float
    """That training waited for it on this rank."""


@dataclass(frozen=True, kw_only=True)
class _Save:
    """The save under way."""

    step: int
    header: dict[str, Any]
    started: float
    seconds: float


class Saver:
    """Saves one run's state. All methods are called on all ranks at the same step.

    Attributes:
        saved_step: of the newest commit that this process knows of; -1 without one.
        last: what the last committed save took; None before the first one.
        seconds: what the last save took by itself, on the slowest rank; None before the first one.
    """

    def __init__(self, ranks: Ranks, store: Store, settings: CheckpointSettings, *, stop: StopFlag, event: Event) -> None:
        """Args:
        ranks: all of them.
        store: the run's folder.
        settings: the run's.
        stop: a request to stop is heard of while a save is waited for, and bounds the time of what is under way.
        event: records that something happened, by name, step and details.
        """
        self._ranks, self._store, self._settings, self._stop, self._event = ranks, store, settings, stop, event
        self.saved_step = -1
        self.seconds: float | None = None
        self.last: Measured | None = None
        self._share = Share(ranks, store)
        self._save: _Save | None = None
        self._phase: Literal["writing", "committing"] = "writing"
        self._turn = self._told_turn = 0
        self._stall = 0.0
        self._failures, self._hopeless = 0, False
        self._begun = 0
        self._run_id = ""

    @property
    def step(self) -> int | None:
        """The step of the save under way; None when there is none."""
        return None if self._save is None else self._save.step

    @property
    def seconds_under_way(self) -> float:
        """For how long the save under way has been so; 0 when there is none."""
        return 0.0 if self._save is None else time.monotonic() - self._save.started

    def begin(
        self, take: Callable[[], tuple[list[Part], Values]], header: dict[str, Any], *, seconds: float | None = None
    ) -> None:
        """Start to save; first wait for a save that is still under way. Nothing is begun if a request to stop comes meanwhile.

        Args:
            take: makes this rank's parts and values, as they are now.
            header: fields of the `trainrun.checkpoint.layout.Commit`, but for what is known here.
            seconds: after which it has failed; ``checkpoint.timeout_seconds`` by default. With it, it is begun in any case.

        Raises:
            CheckpointError: the save that was waited for was the last failure that the settings allow.
        """
        started = time.monotonic()
        self.wait()
        if seconds is None and self._stop.deadline is not None:
            return
        self._run_id = self._run_id or self._ranks.from_first(new_attempt())
        self._begun += 1
        attempt = f"{self._run_id}-{self._begun}"
        seconds = min(self._settings.timeout_seconds, self._settings.timeout_seconds if seconds is None else seconds)
        self._save = _Save(
            step=header["step"],
            header={**header, "attempt": attempt, "time": time.time(), "world": self._ranks.size},
            started=started,
            seconds=seconds,
        )
        self._phase = "writing"
        self._turn += 1
        self._share.begin(take, step=header["step"], attempt=attempt, seconds=seconds)
        self._stall = time.monotonic() - started

    def before_update(self) -> None:
        """Call it before the optimizer takes a step: it waits for the copying, not for the store."""
        if self._save is not None:
            started = time.monotonic()
            self._share.before_update()
            self._stall += time.monotonic() - started

    def tells(self) -> tuple[int, int, int]:
        """Whether this rank is busy with the save, whether it has failed here, and the milliseconds that the last one took: for
        `hear`, which takes the largest."""
        self._told_turn = self._turn
        if self._save is None and not self._share.pruning:
            return 0, 0, self._took
        self._share.poll()
        return int(self._share.busy), int(self._share.problem is not None), self._took

    def hear(self, busy: int, failed: int, took: int) -> None:
        """What `tells` gives of all ranks, as of its last call.

        Raises:
            CheckpointError: the save has failed, and it was the last failure in a row that the settings allow.
        """
        self.seconds = took / 1000 if took else None
        if self._save is not None and self._told_turn == self._turn and not busy:
            self._go_on(self._reasons() if failed else [])

    def wait(self) -> None:
        """Until the save under way, if any, is committed or has failed; whatever was not done in time for a stop has failed.

        Raises:
            CheckpointError: as `hear`.
        """
        while self._save is not None:
            started = time.monotonic()
            self._share.before_update()
            busy = 1
            while busy:
                if self._stop.deadline is not None:
                    self._share.hurry(max(0.0, self._stop.deadline - EXIT_SECONDS - time.monotonic()))
                self._share.wait(TICK_SECONDS)
                busy, asked, took = self._ranks.largest([int(self._share.busy), self._stop.urgency(), self._took])
                self._stop.hear(asked)
                self.seconds = took / 1000 if took else None
            self._stall += time.monotonic() - started
            self._go_on(self._reasons())

    def close(self, *, tidy: bool = False) -> None:
        """Leave no process behind. A save under way is abandoned; ``tidy`` waits until old checkpoints are deleted."""
        if tidy:
            self._share.wait_for_pruning()
        self._share.close()
        self._save = None

    @property
    def _took(self) -> int:
        return int(1000 * self._share.seconds)

    def _reasons(self) -> list[str]:
        """What has failed on which rank. `_hopeless` is then whether another save would fail likewise."""
        mine = self._share.problem
        gathered = self._ranks.gather([mine and f"rank {self._ranks.rank}: {mine}", self._share.hopeless])
        self._hopeless = any(hopeless for _, hopeless in gathered)
        return [reason for reason, _ in gathered if reason]

    def _go_on(self, problems: list[str]) -> None:
        """What all ranks do when none is busy any more."""
        assert self._save is not None
        self._turn += 1
        if problems:
            self._fail("; ".join(problems))
        elif self._phase == "writing":
            self._phase = "committing"
            if self._ranks.first:
                self._share.commit(self._save.header, to_mapping(self._settings), seconds=self._save.seconds)
        else:
            self._commit_is_known()

    def _commit_is_known(self) -> None:
        assert self._save is not None
        save, self._save = self._save, None
        size, own = self._share.committed
        if not own:
            self._ranks.say(
                f"WARNING: step {save.step} was committed by another attempt first, and that one stays. If no launch before this "
                "one was still saving it, two launches use the same run name at once: end one of them, or name it anew."
            )
        self._failures, self.saved_step = 0, save.step
        self.last = Measured(step=save.step, bytes=size, seconds=time.monotonic() - save.started, stall_seconds=self._stall)
        self._event(
            "committed",
            step=save.step,
            seconds=round(self.last.seconds, 3),
            bytes=size,
            stall_seconds=round(self._stall, 4),
        )

    def _fail(self, problem: str) -> None:
        assert self._save is not None
        save, self._save = self._save, None
        self._failures += 1
        most = self._settings.most_failures
        self._event("save_failed", step=save.step, reason=problem)
        self._ranks.say(f"WARNING: saving step {save.step} failed ({self._failures} of {most} in a row): {problem}")
        if self._hopeless:
            raise CheckpointError(f"The state of step {save.step} cannot be saved, and no later one could: {problem}")
        if self._failures >= most:
            raise CheckpointError(f"{most} saves in a row failed, the last at step {save.step}: {problem}")
