"""From the checkpoints of a run to what trains here: the newest that is whole, on all ranks, or none.

Collective: every rank does the same at the same time, and whatever goes wrong on one rank is decided on by all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from trainrun.checkpoint import random_streams, read
from trainrun.checkpoint.layout import (
    Commit,
    Damaged,
    commit_key,
    commit_text,
    committed_steps,
    new_attempt,
    parse_commit,
    step_directory,
)
from trainrun.checkpoint.partial import Kinds, LoadedWeights, matched, step_of
from trainrun.checkpoint.parts import Part, whole
from trainrun.checkpoint.tensors import Named
from trainrun.config import ConfigError, from_mapping, to_mapping
from trainrun.data.stream import Stream
from trainrun.errors import CheckpointError
from trainrun.models.gpt import GPT
from trainrun.ranks import seed_everything, stream_seed
from trainrun.settings import ModelSettings, TrainSettings, WeightsSettings
from trainrun.store import Store, StoreError, StoreKeyMissing
from trainrun.strategies.base import Strategy
from trainrun.words import counted

if TYPE_CHECKING:
    from trainrun.run import Run

OPTIMIZER = "run/optimizer"
"""The name of the value that tells the optimizer's class."""


T = TypeVar("T")

SET_BACK = "Set the model back, or start another run by another name."


class Restore:
    """Restores a run into its model, optimizer, data stream and counters."""

    def __init__(self, run: Run, *, strategy: Strategy, optimizer: torch.optim.Optimizer, data: Stream | None) -> None:
        self._run, self._strategy, self._optimizer, self._data = run, strategy, optimizer, data
        self._ranks = run.ranks
        self._say = run.ranks.say

    def newest(self, store: Store) -> int | None:
        """Load the newest checkpoint that is whole; damaged ones above it are told about and set aside.

        Args:
            store: the run's folder.

        Returns:
            The step of what was loaded; None when there is no checkpoint.

        Raises:
            CheckpointError: there are checkpoints, but none can be read.
            ConfigError: the checkpoint is of another model, optimizer or dataset.
        """
        steps: list[int] = self._on_first(lambda: committed_steps(store), f"list the checkpoints at {store.url}")
        damaged: list[_Damaged] = []
        for step in reversed(steps):
            found = self._load(store, step, lambda commit: self._load_commit(store, commit))
            if not isinstance(found, _Damaged):
                self._set_aside(store, damaged, resumed_from=step)
                self._run.event("resumed", damaged=len(damaged), world=self._run.ranks.size)
                self._say(f"Resumed from step {step} ({store.locate(commit_key(step))}).")
                return step
            damaged.append(found)
            self._say(f"WARNING: the checkpoint of step {step} is damaged: {found.problem}. Trying the one before it.")
        if steps:
            raise CheckpointError(
                f"None of the {len(steps)} checkpoints at {store.url} (steps {steps[0]} to {steps[-1]}) can be read; the newest: "
                f"{damaged[0].problem}. Nothing was trained. Repair the store, or start anew under another run name."
            )
        self._say(f"No checkpoint at {store.url}: starting at step 0.")
        return None

    def weights(self, source: WeightsSettings) -> LoadedWeights:
        """Load weights of another run's newest whole checkpoint, or of the one that ``source`` names; nothing else of it.

        Nothing is ever renamed or set aside there: the run is another's.

        Raises:
            CheckpointError: there is no checkpoint, or none can be read.
            ConfigError: its tensors are not those of this model.
        """
        store, step = step_of(source.checkpoint)
        steps: list[int] = self._on_first(lambda: committed_steps(store), f"list the checkpoints at {store.url}")
        if step is not None and step not in steps:
            raise CheckpointError(f"There is no checkpoint of step {step} at {store.url}. There are: {steps or 'none'}.")
        problems = []
        for candidate in [step] if step is not None else reversed(steps):
            outcome = self._load(store, candidate, lambda commit: self._load_weights(store, commit, source))
            if not isinstance(outcome, _Damaged):
                self._say(f"Weights were loaded from {store.locate(step_directory(candidate))}: {outcome.said}.")
                self._run.event("weights loaded", source=store.url, of_step=candidate)
                return outcome
            problems.append(outcome.problem)
            self._say(f"WARNING: the checkpoint of step {candidate} at {store.url} is damaged: {outcome.problem}.")
        if not steps:
            raise CheckpointError(
                f"There is no checkpoint at {store.url} to take weights from: set weights.checkpoint to the "
                "folder of a run, LOCATION/RUN, or to one of its steps."
            )
        raise CheckpointError(f"No checkpoint at {store.url} could be read for its weights: {problems[0]}.")

    def _load_weights(self, store: Store, commit: Commit, source: WeightsSettings) -> LoadedWeights:
        parts = self._strategy.model_parts()
        there = {name: kind for name, kind in read.kinds(commit).items() if name.startswith("model/")}
        found = matched(self._kinds(parts), {name: _kind(tensor) for name, tensor in there.items()}, source, step=commit.step)
        if source.strict and tuple(source.select) == ("*",):
            with _believing("its settings"):
                self._require_same_bundled_model(commit, "Set the model back, or weights.strict to false.")
        read.load_into(
            [replace(part, name=found.sources[part.name]) for part in parts if part.name in found.sources], store, commit
        )
        return found

    @property
    def _settings(self) -> TrainSettings:
        """The run's, which resolves what is "auto" only when it trains."""
        return self._run.settings

    def _load(self, store: Store, step: int, load: Callable[[Commit], T]) -> T | _Damaged:
        """``load`` one checkpoint on all ranks: what that returns, or the damage that one of them found."""
        text: str | None = self._on_first(lambda: _text_or_none(store, step), f"read {store.locate(commit_key(step))}")
        if text is None:
            return _Damaged(step, None, f"rank 0: {store.locate(commit_key(step))} is gone")
        try:
            commit = parse_commit(text, step)
        except Damaged as error:  # on all ranks alike
            return _Damaged(step, text, f"rank 0: {error}")
        lacking: str | None = self._on_first(lambda: read.lacking(store, commit), f"list the shards of step {step}")
        if lacking:  # before memory is taken for what a COMMIT only claims
            return _Damaged(step, text, f"rank 0: {lacking}")
        mine: dict[str, str] = {}
        try:
            loaded = load(commit)
        except read.Gone as error:  # rank 0 has seen it: not the checkpoint is damaged, but this rank's view of the store
            mine = {"failure": f"rank {self._ranks.rank} does not find what is in the listing: {error}"}
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
            return _Damaged(step, text, "; ".join(damage))
        self._strategy.restored()
        return loaded

    def _load_commit(self, store: Store, commit: Commit) -> None:
        """Restore this rank's share, but for what needs the others, who may have found damage."""
        kinds = read.kinds(commit)
        model_parts = self._strategy.model_parts()
        self._require_same_model(model_parts, {n: kind for n, kind in kinds.items() if n.startswith("model/")}, commit.step)
        with _believing("its settings"):
            self._require_same_bundled_model(commit)
            self._require_same_optimizer(commit)
        if self._data is not None and commit.data:
            with _believing("the position in the data"):
                self._data.load_state(commit.data)
        elif self._data is not None:
            self._say("The checkpoint has no position in the data, since it was converted from another one: they begin anew.")
        wanted = {name: kind for name, kind in kinds.items() if name.startswith("optimizer/")}
        optimizer_parts = self._strategy.optimizer_targets(self._optimizer, wanted)
        alike = (commit.world, commit.mesh.get("tensor", 1)) == (self._ranks.size, self._ranks.tensor_parallel)
        streams = self._streams(kinds) if alike else {}
        read.load_into([*model_parts, *optimizer_parts, *(whole(n, tensor) for n, tensor in streams.items())], store, commit)
        values = commit.values()
        self._run.completed, self._run.tokens_done = commit.step, commit.tokens
        with _believing("what it says beside the tensors"):
            self._load_values({name: value for name, value in values.items() if not name.startswith("rng/")}, commit)
            if streams:
                random_streams.load_random_state(self._ranks.rank, self._ranks.device, streams, values)
        if not wanted and not commit.data:
            self._say("The checkpoint was converted from one that has no optimizer state: the optimizer begins anew.")
        if not streams:
            seed_everything(stream_seed(self._settings.seed, self._ranks.data_rank, commit.step))
            if alike:
                self._say("The checkpoint has no random streams (dropout) that fit here: they are seeded anew.")
                return
            split, split_now = commit.mesh.get("tensor", 1), self._ranks.tensor_parallel
            otherwise = "" if split == split_now else f", and tensor_parallel was {split}, now {split_now}"
            self._say(
                f"The checkpoint was written by {counted(commit.world, 'rank')}, now there are {self._ranks.size}{otherwise}: "
                "random streams (dropout) do not go on, they are seeded anew. Data order and all else go on."
            )

    def _streams(self, kinds: Named) -> Named:
        """Memory for this rank's random streams; nothing where the checkpoint's are of another kind than those here."""
        here, _ = random_streams.random_state(self._ranks.rank, self._ranks.device)
        there = {name: kinds[name] for name in here if name in kinds}
        if not there or any((kind.shape, kind.dtype) != (here[n].shape, here[n].dtype) for n, kind in there.items()):
            return {}
        return {name: torch.empty_like(kind, device="cpu") for name, kind in there.items()}

    def _load_values(self, values: dict[str, Any], commit: Commit) -> None:
        """Hand the strategy its values, and say which of them (a loss scale) only one of both runs has."""
        before, now = commit.settings.get("precision"), self._settings.precision
        there = {name for name in values if name.startswith("strategy/")}
        here = {name for name in self._strategy.values(self._optimizer) if name.startswith("strategy/")}
        self._strategy.load_values(self._optimizer, values)
        for name in sorted(there ^ here) if before is not None else ():  # who converted a checkpoint knows that
            words = name.removeprefix("strategy/").replace("_", " ")
            if name in there:
                self._say(f"The checkpoint has a {words}, which {now} has no use for: it is left out (written with {before}).")
            else:
                self._say(f"The checkpoint has no {words} (it was written with precision {before}): it begins anew for {now}.")

    def _require_same_model(self, parts: list[Part], there: Named, step: int) -> None:
        """Raise a ConfigError, on all ranks, that names what differs between this model and the checkpoint's."""
        here = self._kinds(parts)
        problems = []
        if missing := sorted(here.keys() - there.keys()):
            problems.append(f"The checkpoint of step {step} lacks what this model has: {', '.join(missing)}.")
        if unknown := sorted(there.keys() - here.keys()):
            problems.append(f"The checkpoint of step {step} has what this model lacks: {', '.join(unknown)}.")
        for name in sorted(here.keys() & there.keys()):
            kind = _kind(there[name])
            if here[name] != kind:
                problems.append(f"{name} is {kind[0]} {kind[1]} in the checkpoint, {here[name][0]} {here[name][1]} here.")
        if problems:
            raise ConfigError([*problems, SET_BACK])

    def _kinds(self, parts: list[Part]) -> Kinds:
        """Type and shape of each tensor of which any rank has parts. Collective."""
        mine = {part.name: [str(part.local.dtype).removeprefix("torch."), list(part.shape)] for part in parts}
        return {name: kind for kinds in self._ranks.gather(mine) for name, kind in kinds.items()}

    def _require_same_bundled_model(self, commit: Commit, advice: str = SET_BACK) -> None:
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
            raise ConfigError([*problems, advice])

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

    def _set_aside(self, store: Store, damaged: list[_Damaged], *, resumed_from: int) -> None:
        """Rename the COMMITs of damaged checkpoints, so that these steps can be committed again when training gets there.

        Their shards stay, for people to look at, until retention finds them old. Where the store cannot be written, or another
        run was faster, things stay as they are.
        """
        if not self._ranks.first:
            return
        for found in damaged:
            try:
                if found.text is None or _text_or_none(store, found.step) != found.text:
                    continue  # set aside by another run, which may have committed the step anew
                evidence = store.get(commit_key(found.step))
                store.put(f"{step_directory(found.step)}/DAMAGED-{new_attempt()}.json", evidence)
                store.delete([commit_key(found.step)])
            except StoreError as error:
                self._say(
                    f"WARNING: the damaged checkpoint of step {found.step} could not be set aside ({error}). Training goes on "
                    f"from step {resumed_from}. Step {found.step} can be saved again only when its COMMIT is gone."
                )
            else:
                self._say(
                    f"WARNING: step {found.step} was set aside as damaged ({found.problem}); training goes on from step "
                    f"{resumed_from}."
                )

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


@dataclass(frozen=True)
class _Damaged:
    """A checkpoint that cannot be used."""

    step: int
    text: str | None
    """Of its COMMIT; None when that is gone."""
    problem: str


@contextlib.contextmanager
def _believing(what: str) -> Iterator[None]:
    """Of values that no check of the layout knows: those that cannot be used are damage."""
    try:
        yield
    except ConfigError:
        raise
    except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise Damaged(f"{what} cannot be used ({type(error).__name__}: {error})") from None


def _text_or_none(store: Store, step: int) -> str | None:
    try:
        return commit_text(store, step)
    except StoreKeyMissing:
        return None


def _kind(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _beyond_shapes(settings: ModelSettings) -> dict[str, Any]:
    """What of the bundled GPT's settings its weights' shapes do not show."""
    mapping = to_mapping(settings)
    for name in ("preset", "vocabulary", "feed_forward"):
        del mapping[name]
    return {**mapping, "kv_heads": settings.kv_heads or settings.heads}
