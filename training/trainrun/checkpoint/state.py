"""The state of a run: what ``state.resume()`` brings back and ``state.save()`` keeps.

Both are collective: every rank calls them at the same step, and whatever goes wrong on one rank is decided on by all.
Restoring is in `trainrun.checkpoint.restore`, how a save goes on beside training in `trainrun.checkpoint.saving`.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

import trainrun
from trainrun.checkpoint import random_streams
from trainrun.checkpoint.arena import require_memory_for_snapshots
from trainrun.checkpoint.digest import gathered, tensors_digest
from trainrun.checkpoint.interval import Interval, SaveCosts
from trainrun.checkpoint.partial import LoadedWeights
from trainrun.checkpoint.parts import Part, to_write, whole
from trainrun.checkpoint.restore import OPTIMIZER, Restore
from trainrun.checkpoint.saving import Saver
from trainrun.checkpoint.snapshot import settled
from trainrun.checkpoint.stopping import Promise, save_before
from trainrun.checkpoint.tensors import canonical
from trainrun.checkpoint.write import Values
from trainrun.config import ConfigError, to_mapping
from trainrun.data.stream import Stream
from trainrun.ranks import Ranks
from trainrun.settings import TrainSettings, WeightsSettings
from trainrun.store import Store, open_store
from trainrun.strategies.base import Strategy

if TYPE_CHECKING:
    from trainrun.run import Run


class TrainState:
    """Everything that a restart has to bring back: model, optimizer, position in the data, step and random streams.

    Made by `trainrun.run.Run.state`. Without a checkpoint location nothing is saved, and nothing is found.
    """

    def __init__(self, run: Run, *, strategy: Strategy, optimizer: torch.optim.Optimizer, data: Stream | None) -> None:
        self._run, self._strategy, self._optimizer, self._data = run, strategy, optimizer, data
        self._ranks: Ranks = run.ranks
        location = run.settings.checkpoint.location
        self._store: Store | None = open_store(location).child(run.settings.run) if location else None
        settings = run.settings.checkpoint
        self._saver = Saver(run.ranks, self._store, settings, stop=run.stop_flag, event=run.event) if self._store else None
        self._interval = Interval(settings, nodes=max(1, run.ranks.size // run.ranks.local_size))
        self._costs, self._promise = SaveCosts(), Promise(settings.stop_seconds)
        self._step_began: float | None = None
        self._beside: int | None = None
        self._thread = threading.get_ident()
        self._wanted = False
        self.resumed = False
        """Whether `resume` was called; the loop needs it before its first step."""

    @property
    def saved_step(self) -> int:
        """The step of the newest commit that this process knows of; -1 without one."""
        return -1 if self._saver is None else self._saver.saved_step

    def resume(self) -> int:
        """Load the newest checkpoint that is whole, on all ranks, whatever number of ranks and whichever strategy wrote it.

        A damaged one is told about, loudly, and set aside; then the one before it is taken. Where the run has none, it starts
        from the weights that ``weights.checkpoint`` names, if it is set.

        Returns:
            The step that the run goes on from; 0 when there is no checkpoint.

        Raises:
            CheckpointError: there are checkpoints, but none can be read. The run never starts anew by itself.
            ConfigError: the checkpoint is of another model, optimizer or dataset.
        """
        self._require_main_thread("resume")
        if self.resumed or self._run.completed:
            raise RuntimeError("state.resume() was called before. Call it once, after run.prepare() and before run.steps().")
        self.resumed = True
        step = self._resume()
        if step == 0 and self._settings.weights.checkpoint:
            self._restore.weights(self._settings.weights)
        return step

    def load(
        self, url: str, *, select: Sequence[str] = ("*",), rename: Mapping[str, str] | None = None, strict: bool = True
    ) -> LoadedWeights:
        """Load weights, and nothing else, from a checkpoint of any run, strategy and world size. Collective.

        Call it after ``run.prepare`` and before the first step; to let the run's own checkpoints count, only where `resume`
        returned 0. Optimizer, step, data and random streams stay as they are.

        Args:
            url: a run's folder (``LOCATION/RUN``), of which the newest whole checkpoint is taken, or one of its steps
                (``LOCATION/RUN/step-000000500``).
            select: patterns of names of parameters and buffers in the checkpoint, as ``blocks.*``.
            rename: beginnings of names there, and what stands for them here; of several that fit the longest counts.
            strict: refuse selected tensors that this model lacks, and, where all are selected, a model that has more.
                Otherwise they are only told, and returned.

        Returns:
            What was loaded, and which names are missing or left over.

        Raises:
            CheckpointError: there is no checkpoint, or none can be read.
            ConfigError: names or shapes do not fit this model; near names are told.
        """
        source = WeightsSettings(checkpoint=url, select=tuple(select), rename=dict(rename or {}), strict=strict)
        return self._restore.weights(source)

    @property
    def _restore(self) -> Restore:
        return Restore(self._run, strategy=self._strategy, optimizer=self._optimizer, data=self._data)

    def _resume(self) -> int:
        if self._store is None or self._saver is None:
            self._ranks.say("No checkpoint location is set: nothing will be saved.")
            return 0
        step = self._restore.newest(self._store)
        if step is None:
            return 0
        self._saver.saved_step = step
        self._interval.go_on_from(step)
        return step

    def model_digest(self) -> str:
        """sha256 of the model as it is in memory, to compare a restored checkpoint with.

        Collective; only rank 0 is told, the others get an empty text. The weights go through rank 0's main memory, one
        tensor after the other. The same weights have the same digest in every strategy and at every world size.
        """
        digest = tensors_digest(gathered(self._strategy.model_parts(), self._ranks))
        return digest if self._ranks.first else ""

    def save(self, *, metric: float | None = None, now: bool = False) -> bool:
        """Save if it is time: every ``checkpoint.every_steps``, and at the last step, which is saved as with ``now``.

        The state is copied while training goes on, up to the next update, and a process of its own writes the copy; training
        waits for neither the store nor the writer. There is one save at a time: one that would overtake it waits for it. A save
        that fails on any rank has failed on all: it is told, training goes on, and the next interval tries again. After
        ``checkpoint.most_failures`` in a row the run stops. Until the next ``run.step`` only it may change weights and optimizer
        state: a save during which something else does fails.

        Args:
            metric: how good the model is at this step, for ``checkpoint.keep_best``; the same on all ranks.
            now: save whatever the step, wait until the checkpoint exists, and try again at once when it fails.

        Returns:
            Whether a checkpoint of this step exists or is under way.

        Raises:
            CheckpointError: the last failure in a row that is allowed, with its reason; of this save only with ``now``, of the
                one before otherwise.
            ConfigError: ``checkpoint.keep_best`` is set, and there is no ``metric``, or it is no number.
            RuntimeError: `resume` was not called, or this is not the thread that made the state.
        """
        self._require_main_thread("save")
        if not self.resumed:
            raise RuntimeError("Call state.resume() before state.save(): what is there already must not be passed over.")
        return self._save(self._number(metric), now=now)

    def _number(self, metric: float | None) -> float | None:
        """A metric as the COMMIT has it: None for one that counts for nothing."""
        if metric is None:
            if self._settings.checkpoint.keep_best:
                raise ConfigError(
                    ["checkpoint.keep_best is set, but the loop gives no metric. Call state.save(metric=...), or leave it out."]
                )
            return None
        try:
            number = float(metric.detach() if isinstance(metric, torch.Tensor) else metric)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError([f"metric is {metric!r}. Allowed: a number, the same on all ranks."]) from None
        if not math.isfinite(number):
            self._ranks.say(f"WARNING: the metric of step {self._run.completed} is {number}: it does not count for keep_best.")
            return None
        return number

    def _require_main_thread(self, call: str) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError(f"state.{call}() was called in another thread than run.state(). Call it in the loop's own.")

    def _save(self, metric: float | None, *, now: bool) -> bool:
        step = self._run.completed
        now = now or step == self._settings.steps  # after which there is nothing that could go on beside it
        if self._saver is None or not (now or self._interval.due(step, under_way=self._saver.step is not None)):
            return False
        if step not in (self._saver.saved_step, self._saver.step):
            self._begin(self._saver, metric)
        if now:
            self._saver.wait()
            while self._saver.saved_step != step and self._run.stop_flag.deadline is None:
                self._begin(self._saver, metric)
                self._saver.wait()
        return step in (self._saver.saved_step, self._saver.step)

    def wait(self) -> None:
        """Until the save under way, if any, is committed or has failed. Collective.

        Raises:
            CheckpointError: as `save`.
        """
        if self._saver is not None:
            self._saver.wait()

    # For the loop (`trainrun.run.Run`)

    def require_memory(self) -> None:
        """Refuse to train where main memory cannot hold a snapshot, and say what the last save will need. Collective.

        Raises:
            ConfigError: with what is needed and what there is.
        """
        if self._saver is not None:
            size = self._bytes_to_come()
            require_memory_for_snapshots(size, self._ranks)
            self._ranks.say(self._promise.at_start(sum(self._ranks.gather(size))))

    def before_update(self) -> tuple[int, ...]:
        """Call it before training itself changes weights or optimizer state.

        Returns:
            What this rank has to tell the others at this step: `hear` takes the largest of each number.
        """
        if self._saver is None:
            return 0, 0, 0, 0
        self._saver.before_update()
        self._measure(self._saver)
        return (*self._saver.tells(), self._interval.proposed)

    def hear(self, busy: int, failed: int, took: int, interval: int, *, wanted: bool = False) -> None:
        """The largest that any rank told; raises as `save`.

        Args:
            busy, failed, took, interval: of `before_update`.
            wanted: a checkpoint was asked for from outside. It is begun as soon as no save is under way, so that no step waits.
        """
        if self._saver is not None:
            self._saver.hear(busy, failed, took)
            self._interval.adopt(interval)
            self._wanted = self._wanted or wanted
            if self._wanted and self.resumed and self._saver.step is None:
                self._save_as_wanted(self._saver)

    def _save_as_wanted(self, saver: Saver) -> None:
        """One save beside those of the interval, which it does not move; none where this step is saved already."""
        self._wanted = False
        step = self._run.completed
        if step == saver.saved_step:
            return
        self._run.event("save_requested")
        self._run.check_finite()
        saver.begin(self._take, self._header(None))

    def save_last(self) -> bool:
        """Save the last step. False when a request to stop left no time for it; raises as `save`."""
        return self._save(None, now=True) or self._saver is None

    def save_before(self, deadline: float) -> None:
        """Save what fits before a `time.monotonic`, when asked to stop, and say what does not. Collective."""
        step = self._run.completed
        if self._saver is None or step in (0, self._saver.saved_step):
            return

        def begin(seconds: float) -> None:
            assert self._saver is not None
            self._run.check_finite()
            self._saver.begin(self._take, self._header(None), seconds=seconds)

        plan, said = save_before(deadline, self._saver, self._ranks, step=step, begin=begin)
        self._run.event("stopped", tried=plan.save, saved_step=self._saver.saved_step)
        if said:
            self._ranks.say(said)

    def finish(self) -> str:
        """Delete what is not kept, and end the writer. Returns the `model_digest`."""
        if self._saver is not None:
            self._saver.close(tidy=True)
        return self.model_digest()

    def close(self) -> None:
        """End the writer; a save under way is abandoned."""
        if self._saver is not None:
            if self._saver.step is not None:
                self._ranks.say(
                    f"WARNING: the save of step {self._saver.step} was under way and is abandoned. Call state.wait() before "
                    "leaving the loop to have it finished."
                )
            self._saver.close()

    @property
    def _settings(self) -> TrainSettings:
        """The run's, which resolves what is "auto" only when it trains."""
        return self._run.settings

    def _begin(self, saver: Saver, metric: float | None) -> None:
        self._run.check_finite()
        saver.begin(self._take, self._header(metric))
        self._interval.begin(self._run.completed)

    def _measure(self, saver: Saver) -> None:
        """What saves cost, for the interval between them, and whether the last one will fit; rank 0 speaks."""
        now = time.monotonic()
        began, self._step_began = self._step_began, now
        beside, self._beside = self._beside, saver.step
        if began is not None:
            self._costs.step(now - began, saving=beside is not None or saver.step is not None)
        if beside is None or beside == saver.step:
            return
        if saver.last is None or saver.last.step != beside:
            self._costs.failed()
            return
        cost = self._costs.committed(saver.last.seconds)
        if cost is not None and self._ranks.first and (said := self._interval.propose(cost)):
            self._ranks.say(said)
            measured = {f"{name}_seconds": round(seconds, 4) for name, seconds in vars(cost).items()}
            self._run.event("interval", steps=self._interval.proposed, **measured)
        if self._ranks.first and saver.seconds and (news := self._promise.measured(saver.seconds, saver.last.bytes)):
            self._ranks.say(news[0])
            self._run.event("last_save", **news[1])

    def _header(self, metric: float | None) -> dict[str, Any]:
        """What the COMMIT says of the run as it is now."""
        return {
            "run": self._settings.run,
            "step": self._run.completed,
            "tokens": self._run.tokens_done,
            "mesh": self._strategy.mesh_sizes(),
            "data": self._data.state() if self._data else {},
            "settings": to_mapping(self._settings),
            "versions": {"trainrun": trainrun.__version__, "torch": torch.__version__},
            "metric": metric,
        }

    def _take(self) -> tuple[list[Part], Values]:
        """What this rank writes: its share of the parts, and its random streams. A forward pass changes nothing of it."""
        parts = to_write([*self._strategy.model_parts(), *self._strategy.optimizer_parts(self._optimizer)])
        module = self._strategy.module  # of which a forward may change the buffers, and the user's code what is not trained
        changing = [*module.named_buffers(), *((name, p) for name, p in module.named_parameters() if not p.requires_grad)]
        at_once = {f"model/{canonical(name)}" for name, _ in changing}
        streams, values = random_streams.random_state(self._ranks.rank, self._ranks.device)
        if self._ranks.first:
            values |= {**self._strategy.values(self._optimizer), OPTIMIZER: type(self._optimizer).__name__}
        random = [whole(name, tensor) for name, tensor in streams.items()]
        return [*settled(parts, lambda part: part.name in at_once), *random], json.loads(json.dumps(values))

    def _bytes_to_come(self) -> int:
        """What this rank will write; of an optimizer that has no state yet, what its kind is known to have."""
        model, optimizer = self._strategy.model_parts(), self._strategy.optimizer_parts(self._optimizer)
        written = sum(part.local.nbytes for part in to_write([*model, *optimizer]))
        if optimizer:
            return written
        defaults = self._optimizer.defaults
        moments = 2 if "betas" in defaults else 1 if defaults.get("momentum") else 0
        trained = {f"model/{canonical(name)}" for name, p in self._strategy.module.named_parameters() if p.requires_grad}
        return written + moments * sum(part.local.nbytes for part in to_write(model) if part.name in trained)
