"""The state of a run: what ``state.resume()`` brings back and ``state.save()`` keeps.

Both are collective: every rank calls them at the same step, and whatever goes wrong on one rank is decided on by all.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

import trainrun
from trainrun.checkpoint import random_streams, write
from trainrun.checkpoint.digest import gathered, tensors_digest
from trainrun.checkpoint.layout import (
    Commit,
    Shard,
    contradiction,
    new_attempt,
)
from trainrun.checkpoint.parts import to_write, whole
from trainrun.checkpoint.restore import OPTIMIZER, Restore
from trainrun.checkpoint.retention import Retention
from trainrun.config import from_mapping, to_mapping
from trainrun.data.stream import Stream
from trainrun.errors import CheckpointError
from trainrun.ranks import Ranks
from trainrun.settings import TrainSettings
from trainrun.store import Store, StoreError, open_store
from trainrun.strategies.base import Strategy

if TYPE_CHECKING:
    from trainrun.run import Run

MOST_FAILURES = 3
"""Saves that may fail in a row before the run stops."""


class TrainState:
    """Everything that a restart has to bring back: model, optimizer, position in the data, step and random streams.

    Made by `trainrun.run.Run.state`. Without a checkpoint location nothing is saved, and nothing is found.
    """

    def __init__(self, run: Run, *, strategy: Strategy, optimizer: torch.optim.Optimizer, data: Stream | None) -> None:
        self._run, self._strategy, self._optimizer, self._data = run, strategy, optimizer, data
        self._ranks: Ranks = run.ranks
        location = run.settings.checkpoint.location
        self._store: Store | None = open_store(location).child(run.settings.run) if location else None
        self._failures = 0
        self.resumed = False
        """Whether `resume` was called; the loop needs it before its first step."""
        self.saved_step = -1
        """The step of the newest commit that this process knows of."""

    def resume(self) -> int:
        """Load the newest checkpoint that is whole, on all ranks, whatever number of ranks and whichever strategy wrote it.

        A damaged one is told about, loudly, and set aside; then the one before it is taken.

        Returns:
            The step that the run goes on from; 0 when there is no checkpoint.

        Raises:
            CheckpointError: there are checkpoints, but none can be read. The run never starts anew by itself.
            ConfigError: the checkpoint is of another model, optimizer or dataset.
        """
        self.resumed = True
        if self._store is None:
            self._ranks.say("No checkpoint location is set: nothing will be saved.")
            return 0
        step = Restore(self._run, strategy=self._strategy, optimizer=self._optimizer, data=self._data).newest(self._store)
        if step is None:
            return 0
        self.saved_step = step
        return step

    def model_digest(self) -> str:
        """sha256 of the model as it is in memory, to compare a restored checkpoint with.

        Collective; only rank 0 is told, the others get an empty text. The weights go through rank 0's main memory, one
        tensor after the other. The same weights have the same digest in every strategy and at every world size.
        """
        digest = tensors_digest(gathered(self._strategy.model_parts(), self._ranks))
        return digest if self._ranks.first else ""

    def save(self, *, now: bool = False) -> bool:
        """Save if it is time: every ``checkpoint.every_steps``, and at the last step.

        A save that fails on any rank has failed on all: it is told, training goes on, and the next interval tries
        again. After three failures in a row the run stops.

        Args:
            now: save whatever the step, and try again at once when it fails.

        Returns:
            Whether a checkpoint of this step now exists because of this call.

        Raises:
            CheckpointError: the third failure in a row, with its reason.
        """
        step = self._run.completed
        every = self._settings.checkpoint.every_steps
        due = now or (every != "auto" and step % every == 0) or step == self._settings.steps
        if self._store is None or not due or step == self.saved_step:
            return False
        self._run.check_finite()
        while True:
            started = time.monotonic()
            problem, size = self._attempt(self._store, step)
            if problem is None:
                self._failures, self.saved_step = 0, step
                self._run.event("committed", seconds=round(time.monotonic() - started, 3), bytes=size)
                self._retain(self._store)
                return True
            self._failures += 1
            self._ranks.say(f"WARNING: saving step {step} failed ({self._failures} of {MOST_FAILURES} in a row): {problem}")
            if self._failures >= MOST_FAILURES:
                raise CheckpointError(f"{MOST_FAILURES} saves in a row failed, the last at step {step}: {problem}")
            if not now:
                return False

    @property
    def _settings(self) -> TrainSettings:
        """The run's, which resolves what is "auto" only when it trains."""
        return self._run.settings

    # Saving

    def _attempt(self, store: Store, step: int) -> tuple[str | None, int]:
        """One save: None, or what went wrong on which rank; and the bytes of all shards."""
        attempt: str = self._ranks.from_first(new_attempt())
        mine: dict[str, Any]
        try:
            shard = write.write_shard(
                store,
                self._snapshot(),
                step=step,
                attempt=attempt,
                rank=self._ranks.rank,
                timeout_seconds=self._settings.checkpoint.timeout_seconds,
            )
            mine = {"shard": to_mapping(shard)}
        except Exception as error:  # whatever it is, the others wait for the answer
            mine = {"problem": f"rank {self._ranks.rank}: {type(error).__name__}: {error}"}
        outcomes = self._ranks.gather(mine)
        problems = [outcome["problem"] for outcome in outcomes if "problem" in outcome]
        shards = [outcome["shard"] for outcome in outcomes if "shard" in outcome]
        if not problems:
            problems = self._ranks.from_first(self._commit(store, step, attempt, shards) if self._ranks.first else [])
        return "; ".join(problems) or None, sum(shard["length"] for shard in shards)

    def _snapshot(self) -> write.Snapshot:
        """What this rank writes: its share of the parts, and its random streams."""
        parts = [*self._strategy.model_parts(), *self._strategy.optimizer_parts(self._optimizer)]
        streams, values = random_streams.random_state(self._ranks.rank, self._ranks.device)
        if self._ranks.first:
            values |= {**self._strategy.values(self._optimizer), OPTIMIZER: type(self._optimizer).__name__}
        return write.take_snapshot([*to_write(parts), *(whole(name, tensor) for name, tensor in streams.items())], values)

    def _commit(self, store: Store, step: int, attempt: str, shards: list[dict[str, Any]]) -> list[str]:
        commit = Commit(
            run=self._settings.run,
            step=step,
            tokens=self._run.tokens_done,
            attempt=attempt,
            time=time.time(),
            world=self._ranks.size,
            mesh=self._strategy.mesh_sizes(),
            data=self._data.state() if self._data else {},
            settings=to_mapping(self._run.settings),
            versions={"trainrun": trainrun.__version__, "torch": torch.__version__},
            shards=tuple(from_mapping(Shard, shard) for shard in shards),
        )
        problem = contradiction(commit, step)
        if problem:
            return [f"what the ranks wrote is no checkpoint: {problem}"]
        try:
            if not write.write_commit(store, commit):
                self._ranks.say(f"Step {step} was committed by another attempt first; that one stays.")
        except StoreError as error:
            return [f"rank 0: {error}"]
        return []

    def _retain(self, store: Store) -> None:
        if not self._ranks.first:
            return
        try:
            Retention(store, self._settings.checkpoint).prune()
        except StoreError as error:
            self._ranks.say(f"WARNING: old checkpoints could not be deleted: {error}")
