"""The state of a run: what ``state.resume()`` brings back and ``state.save()`` keeps.

Both are collective: every rank calls them at the same step, and whatever goes wrong on one rank is decided on by all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

import trainrun
from trainrun.checkpoint import random_streams, read, retention, write
from trainrun.checkpoint.digest import gathered, tensors_digest
from trainrun.checkpoint.layout import (
    Commit,
    Damaged,
    Shard,
    commit_key,
    committed_steps,
    contradiction,
    new_attempt,
    parse_commit,
    step_directory,
)
from trainrun.checkpoint.parts import Part, to_write, whole
from trainrun.checkpoint.tensors import Named
from trainrun.config import ConfigError, from_mapping, to_mapping
from trainrun.data.stream import Stream
from trainrun.errors import CheckpointError
from trainrun.models.gpt import GPT
from trainrun.ranks import Ranks, seed_everything, stream_seed
from trainrun.settings import ModelSettings, TrainSettings
from trainrun.store import Store, StoreError, StoreKeyMissing, open_store
from trainrun.strategies.base import Strategy
from trainrun.words import counted

if TYPE_CHECKING:
    from trainrun.run import Run

MOST_FAILURES = 3
"""Saves that may fail in a row before the run stops."""

OPTIMIZER = "run/optimizer"
"""The name of the value that tells the optimizer's class."""


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
            self._say("No checkpoint location is set: nothing will be saved.")
            return 0
        store = self._store
        steps: list[int] = self._on_first(lambda: committed_steps(store), f"list the checkpoints at {store.url}")
        damaged: list[tuple[int, str]] = []
        for step in reversed(steps):
            problem = self._load(store, step)
            if problem is None:
                self._set_aside(store, damaged, resumed_from=step)
                self.saved_step = step
                self._run.event("resumed", damaged=len(damaged), world=self._run.ranks.size)
                self._say(f"Resumed from step {step} ({store.locate(commit_key(step))}).")
                return step
            damaged.append((step, problem))
            self._say(f"WARNING: the checkpoint of step {step} is damaged: {problem}. Trying the one before it.")
        if steps:
            raise CheckpointError(
                f"None of the {len(steps)} checkpoints at {store.url} (steps {steps[0]} to {steps[-1]}) can be read; the newest: "
                f"{damaged[0][1]}. Nothing was trained. Repair the store, or start anew under another run name."
            )
        self._say(f"No checkpoint at {store.url}: starting at step 0.")
        return 0

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
        due = now or step % self._settings.checkpoint.every_steps == 0 or step == self._settings.steps
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
            self._say(f"WARNING: saving step {step} failed ({self._failures} of {MOST_FAILURES} in a row): {problem}")
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
                self._say(f"Step {step} was committed by another attempt first; that one stays.")
        except StoreError as error:
            return [f"rank 0: {error}"]
        return []

    def _retain(self, store: Store) -> None:
        if not self._ranks.first:
            return
        try:
            retention.keep_newest(
                store,
                self._settings.checkpoint.keep,
                abandoned_after_seconds=2 * self._settings.checkpoint.timeout_seconds,
            )
        except (StoreError, Damaged, CheckpointError) as error:
            self._say(f"WARNING: old checkpoints could not be deleted: {error}")

    # Restoring

    def _load(self, store: Store, step: int) -> str | None:
        """Load one checkpoint on all ranks: None, or the damage that one of them found."""
        text: str | None = self._on_first(lambda: _text_or_none(store, step), f"read {store.locate(commit_key(step))}")
        mine: dict[str, str] = {}
        try:
            if text is None:
                raise Damaged(f"{commit_key(step)} is gone")
            commit = parse_commit(text, step)
            self._load_commit(store, commit)
        except Damaged as error:
            mine = {"damage": f"rank {self._ranks.rank}: {error}"}
        except StoreError as error:
            mine = {"failure": f"rank {self._ranks.rank}: {error}"}
        outcomes = self._ranks.gather(mine)
        failures = [outcome["failure"] for outcome in outcomes if "failure" in outcome]
        if failures:  # not damage: the checkpoint may be whole, and an older one would throw work away
            raise CheckpointError(f"The checkpoint of step {step} could not be read: {'; '.join(failures)}")
        damage = [outcome["damage"] for outcome in outcomes if "damage" in outcome]
        if damage:
            return "; ".join(damage)
        self._strategy.restored()
        self._run.completed, self._run.tokens_done = commit.step, commit.tokens
        return None

    def _load_commit(self, store: Store, commit: Commit) -> None:
        """Restore this rank's share, but for what needs the others, who may have found damage."""
        kinds = commit.kinds()
        model_parts = self._strategy.model_parts()
        self._require_same_model(model_parts, {n: kind for n, kind in kinds.items() if n.startswith("model/")}, commit.step)
        self._require_same_bundled_model(commit)
        self._require_same_optimizer(commit)
        if self._data is not None:
            self._data.load_state(commit.data)
        wanted = {name: kind for name, kind in kinds.items() if name.startswith("optimizer/")}
        optimizer_parts = self._strategy.optimizer_targets(self._optimizer, wanted)
        streams: Named = {}
        if (commit.world, commit.mesh.get("tensor", 1)) == (self._ranks.size, self._ranks.tensor_parallel):
            own_streams = f"rng/{self._ranks.rank}/"
            streams = {n: torch.empty_like(k, device="cpu") for n, k in kinds.items() if n.startswith(own_streams)}
        read.load_into([*model_parts, *optimizer_parts, *(whole(n, tensor) for n, tensor in streams.items())], store, commit)
        values = commit.values()
        self._load_values({name: value for name, value in values.items() if not name.startswith("rng/")}, commit)
        if streams:
            random_streams.load_random_state(self._ranks.rank, self._ranks.device, streams, values)
        else:
            seed_everything(stream_seed(self._settings.seed, self._ranks.data_rank, commit.step))
            split, split_now = commit.mesh.get("tensor", 1), self._ranks.tensor_parallel
            otherwise = "" if split == split_now else f", and tensor_parallel was {split}, now {split_now}"
            self._say(
                f"The checkpoint was written by {counted(commit.world, 'rank')}, now there are {self._ranks.size}{otherwise}: "
                "random streams (dropout) do not go on, they are seeded anew. Data order and all else go on."
            )

    def _load_values(self, values: dict[str, Any], commit: Commit) -> None:
        """Hand the strategy its values, and say which of them (a loss scale) only one of both runs has."""
        before, now = commit.settings.get("precision"), self._settings.precision
        there = {name for name in values if name.startswith("strategy/")}
        here = {name for name in self._strategy.values(self._optimizer) if name.startswith("strategy/")}
        self._strategy.load_values(self._optimizer, values)
        for name in sorted(there ^ here):
            words = name.removeprefix("strategy/").replace("_", " ")
            if name in there:
                self._say(f"The checkpoint has a {words}, which {now} has no use for: it is left out (written with {before}).")
            else:
                self._say(f"The checkpoint has no {words} (it was written with precision {before}): it begins anew for {now}.")

    def _require_same_model(self, parts: list[Part], there: Named, step: int) -> None:
        """Raise a ConfigError, on all ranks, that names what differs between this model and the checkpoint's."""
        mine = {part.name: [str(part.local.dtype).removeprefix("torch."), list(part.shape)] for part in parts}
        here = {name: kind for kinds in self._ranks.gather(mine) for name, kind in kinds.items()}
        problems = []
        if missing := sorted(here.keys() - there.keys()):
            problems.append(f"The checkpoint of step {step} lacks what this model has: {', '.join(missing)}.")
        if unknown := sorted(there.keys() - here.keys()):
            problems.append(f"The checkpoint of step {step} has what this model lacks: {', '.join(unknown)}.")
        for name in sorted(here.keys() & there.keys()):
            kind = [str(there[name].dtype).removeprefix("torch."), list(there[name].shape)]
            if here[name] != kind:
                problems.append(f"{name} is {kind[0]} {kind[1]} in the checkpoint, {here[name][0]} {here[name][1]} here.")
        if problems:
            raise ConfigError([*problems, "Set the model back, or start another run by another name."])

    def _require_same_bundled_model(self, commit: Commit) -> None:
        """Raise a ConfigError where the bundled GPT would compute otherwise than it did, with weights of the same shapes."""
        model, recorded = self._strategy.module, commit.settings.get("model")
        if not isinstance(model, GPT) or model.settings != self._settings.model or recorded is None:
            return  # of what another model was made, settings do not tell
        before = _beyond_shapes(from_mapping(ModelSettings, recorded, source=f"the checkpoint of step {commit.step}"))
        now = _beyond_shapes(self._settings.model)
        problems = [
            f"model.{name} was {before[name]!r} when the checkpoint of step {commit.step} was written, and is {now[name]!r} here."
            for name in now
            if before[name] != now[name]
        ]
        if problems:
            raise ConfigError([*problems, "Set the model back, or start another run by another name."])

    def _require_same_optimizer(self, commit: Commit) -> None:
        """Raise a ConfigError where the state of one optimizer would be taken for that of another."""
        before, now = commit.settings.get("optimizer", {}).get("name"), self._settings.optimizer.name
        if before != now:
            raise ConfigError(
                [
                    f'The checkpoint of step {commit.step} was trained by optimizer.name "{before}", this run has "{now}": their '
                    "states are not alike. Set it back, or start another run by another name."
                ]
            )
        made, makes = commit.values().get(OPTIMIZER), type(self._optimizer).__name__
        if made is not None and made != makes:  # a checkpoint of before this was recorded does not tell
            raise ConfigError(
                [
                    f"The checkpoint of step {commit.step} was trained by the optimizer {made}, this run has {makes}: their "
                    "states are not alike. Set it back, or start another run by another name."
                ]
            )

    def _set_aside(self, store: Store, damaged: list[tuple[int, str]], *, resumed_from: int) -> None:
        """Rename the COMMITs of damaged checkpoints, so that these steps can be committed again when training gets there."""

        def rename() -> None:
            for step, problem in damaged:
                evidence = store.get(commit_key(step))
                store.put(f"{step_directory(step)}/DAMAGED-{new_attempt()}.json", evidence)
                store.delete([commit_key(step)])
                self._say(
                    f"WARNING: step {step} was set aside as damaged ({problem}); training goes on from step {resumed_from}."
                )

        self._on_first(rename, "set damaged checkpoints aside")

    # Together

    def _on_first(self, act: Callable[[], Any], purpose: str) -> Any:
        """The JSON-able result of ``act`` on rank 0, on all ranks; when it fails, all ranks raise."""
        outcome: dict[str, Any] = {}
        if self._ranks.first:
            try:
                outcome = {"result": act()}
            except StoreError as error:
                outcome = {"problem": str(error)}
        outcome = self._ranks.from_first(outcome)
        if "problem" in outcome:
            raise CheckpointError(f"Could not {purpose}: {outcome['problem']}")
        return outcome["result"]

    def _say(self, text: str) -> None:
        if self._ranks.first:
            print(text, file=sys.stderr, flush=True)


def _text_or_none(store: Store, step: int) -> str | None:
    try:
        return store.get(commit_key(step)).decode(errors="replace")
    except StoreKeyMissing:
        return None


def _beyond_shapes(settings: ModelSettings) -> dict[str, Any]:
    """What of the bundled GPT's settings its weights' shapes do not show."""
    mapping = to_mapping(settings)
    for name in ("preset", "vocabulary", "feed_forward"):
        del mapping[name]
    return {**mapping, "kv_heads": settings.kv_heads or settings.heads}
