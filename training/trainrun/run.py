"""A training run: primitives around a loop that stays the user's. `trainrun.pretrain` is such a loop."""

from __future__ import annotations

import atexit
import dataclasses
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainrun import complaints, stop
from trainrun.agreement import Agreement
from trainrun.checkpoint.state import TrainState
from trainrun.config import ConfigError
from trainrun.data.dataset import TRAIN, Described, open_dataset
from trainrun.data.examples import open_examples
from trainrun.data.examples_stream import ExampleStream
from trainrun.data.stream import Stream, TokenStream
from trainrun.deepspeed_json import remarks, whole_batch
from trainrun.metrics.flops import flops_of
from trainrun.metrics.progress import Progress
from trainrun.models.weights import Weights
from trainrun.optimizer import schedule
from trainrun.passes import Passes, require_loss, require_prepared
from trainrun.prepare import PreparedModel
from trainrun.probe import advised, fitting_micro_batch, said
from trainrun.profile import ProfiledSteps
from trainrun.pulse import Pulse
from trainrun.ranks import LONGEST_STORAGE_WAIT, Ranks, join, leave, seed_everything, stream_seed
from trainrun.save_request import SaveRequest
from trainrun.settings import TrainSettings
from trainrun.settings.finetune import Task
from trainrun.settle import settle, usage
from trainrun.strategies.auto import resolve
from trainrun.strategies.base import Strategy
from trainrun.strategies.choose import strategy_of
from trainrun.strategies.host_memory import require_host_memory

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


def start(
    path: str | Path | None = None, arguments: Sequence[str] | None = None, *, defaults: Mapping[str, Any] | None = None
) -> Run:
    """Open a run in this process, together with the other ranks that torchrun started, if any.

    Args:
        path: a YAML or JSON file with fields of `trainrun.settings.TrainSettings`, laid over the defaults. Over it come
            the node's RunSpec (named by ``$TRAINRUN_SPEC``) and then ``arguments``.
        arguments: ``--a.b=c`` overrides, after an optional settings file; by default those of the command line.
        defaults: the lowest layer: what the script has instead of defaults of `TrainSettings`, as
            ``{"optimizer": {"learning_rate": 2e-5}}``. A settings file, a DeepSpeed file and all else lie over it.

    From here on an error of trainrun's that nobody catches is told in sentences, without a traceback, and once for all ranks
    (`trainrun.complaints`). ``--help`` among the arguments ends the process with a list of the settings.

    Raises:
        ConfigError: a setting that is unknown or wrong.
    """
    told = complaints.install()
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        if os.environ.get("RANK", "0") == "0":
            print(usage(Path(sys.argv[0]).name))
        raise SystemExit(0)
    settings = settle(path, arguments, defaults=defaults)
    ranks = join(
        timeout_seconds=settings.first_collective_timeout_seconds,
        storage_timeout_seconds=settings.checkpoint.timeout_seconds + LONGEST_STORAGE_WAIT,
        tensor_parallel=settings.sharding.tensor_parallel,
    )
    seed_everything(settings.seed)  # the same everywhere, so that every rank makes the same model
    state_directory = Path(os.environ["TRAINRUN_STATE"]) if os.environ.get("TRAINRUN_STATE") else None
    run = Run(settings, ranks, state_directory)
    told.concerning(run)
    return run


class Run:
    """What `start` returns. The order of use is that of the loop in `trainrun.pretrain`.

    Attributes:
        settings: the resolved settings.
        ranks: this process among its peers; ``ranks.device`` is where it computes.
        completed: optimizer steps done, in all restarts together.
        tokens_done: tokens trained on, in all.
        stop_flag: whether, and until when, the run was asked to stop.
    """

    def __init__(self, settings: TrainSettings, ranks: Ranks, state_directory: Path | None) -> None:
        self.settings = settings
        self.ranks = ranks
        self.completed = 0
        self.tokens_done = 0
        self._state_directory = state_directory
        self.stop_flag = stop.StopFlag(state_directory, stop_seconds=settings.checkpoint.stop_seconds)
        self._save_request = SaveRequest(state_directory)
        self._agreement = Agreement(ranks)
        self._progress = Progress(settings, ranks, state_directory / "metrics" if state_directory else None)
        self._pulse = Pulse(state_directory, ranks.rank)
        self._strategy: Strategy | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._data: Stream | None = None
        self._state: TrainState | None = None
        self._passes = Passes()
        self._peaks: list[float] = []
        self._loss = torch.zeros((), device=ranks.device)
        self._norm: Tensor | float = torch.zeros((), device=ranks.device)

    @property
    def saved_step(self) -> int | None:
        """The step of the newest checkpoint that this process knows of; None without one."""
        return None if self._state is None or self._state.saved_step < 0 else self._state.saved_step

    def prepare(
        self, model: nn.Module, optimizer: AnyOptimizer, *, weights: Weights | None = None
    ) -> tuple[PreparedModel, AnyOptimizer]:
        """Put the model on the device and make replicas of it on all ranks.

        Args:
            model: as made on every rank; rank 0's weights are sent to the others.
            optimizer: over the model's parameters. The learning rate of each of its groups is the peak of the schedule.
            weights: where to read what the model has on the meta device; the model's own ``initial`` by default.

        Raises:
            RuntimeError: the run has a model already.
            ConfigError: model, optimizer or machine do not go with the settings.
        """
        if self._strategy is not None:
            raise RuntimeError(
                "run.prepare() was called before: a run trains one model with one optimizer. For several models, put them into "
                "one nn.Module and give the optimizer one group of parameters for each."
            )
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]
        length = self.settings.sequence_length if self._data is None else self._data.sequence_length
        self._progress.describe(flops_of(model, sequence_length=length))
        self._settle_strategy(model)
        self._strategy = strategy_of(self.settings, self.ranks)
        self._strategy.weights = weights
        self._optimizer = optimizer
        self._strategy.prepare(model, optimizer)
        prepared = PreparedModel(
            self._strategy, last_micro_batch=self._last_micro_batch, passed=self._passed, advised=self._advised
        )
        seed_everything(stream_seed(self.settings.seed, self.ranks.data_rank, 0))  # from here on they draw apart (dropout)
        return prepared, optimizer

    def _settle_strategy(self, model: nn.Module) -> None:
        """From here on the settings name what is used, in metric lines and checkpoints too."""
        if self.settings.strategy == "auto":
            choice = resolve(self.settings, self.ranks, model)
            self.settings = choice.settings
            self._progress.say(choice.reason)
            self.event("strategy", chosen=self.settings.strategy, reason=choice.reason)
        require_host_memory(self.settings, self.ranks, model)
        for remark in remarks(self.settings):
            self._progress.say(remark)

    def tokens(self, url: str | None = None, *, sequence_length: int | None = None) -> TokenStream:
        """The training split of a token dataset as a stream of micro-batches.

        Args:
            url: a directory or ``s3://bucket/prefix`` that ``trainrun tokens`` wrote; ``settings.data`` by default.
            sequence_length: tokens per sequence; ``settings.sequence_length`` by default.

        Raises:
            ConfigError: no such dataset, it is not the same for all ranks, or the batch does not divide among them.
        """
        if self.settings.batch_examples:
            raise ConfigError(["batch_examples is set, but the data are a stream of tokens. Set batch_tokens instead."])
        dataset = open_dataset(url or self.settings.data)
        self._require_same(dataset.description, dataset.store.url)
        self._data = TokenStream(
            dataset.tokens(TRAIN),
            vocabulary=dataset.description.vocabulary,
            fingerprint=dataset.description.fingerprint,
            tokenizer=dataset.description.tokenizer,
            batch_tokens=self.settings.batch_tokens,
            sequence_length=sequence_length or self.settings.sequence_length,
            micro_batch=self._micro_batch,
            seed=self.settings.seed,
            ranks=self.ranks,
        )
        return self._data

    def examples(self, url: str | None = None, *, task: Task | None = None) -> ExampleStream:
        """A dataset of examples, for fine-tuning, as a stream of micro-batches.

        Args:
            url: a directory or ``s3://bucket/prefix`` that ``trainrun examples`` wrote; ``settings.data`` by default.
            task: what is learnt of it; ``settings.finetune.task`` by default.

        Raises:
            ConfigError: no such dataset, it is not the same for all ranks or not for this task, or the batch is not set or does
                not divide among them.
        """
        if not self.settings.batch_examples:
            number = whole_batch(self.settings.deepspeed, ranks=self.ranks.size)
            advice = f"it to {number}, as the DeepSpeed file says" if number else "how many of them make an optimizer step"
            raise ConfigError([f"batch_examples is not set, and the data are examples. Set {advice}."])
        examples = open_examples(url or self.settings.data)
        self._require_same(examples.description, examples.url)
        self._data = stream = ExampleStream(
            examples,
            task=task or self.settings.finetune.task,
            batch_examples=self.settings.batch_examples,
            sequence_length=self.settings.sequence_length,
            micro_batch=self._micro_batch,
            seed=self.settings.seed,
            ranks=self.ranks,
        )
        return stream

    def state(self, *, model: PreparedModel, optimizer: torch.optim.Optimizer, data: Stream | None = None) -> TrainState:
        """What checkpoints hold; call its ``resume()`` before the loop and its ``save()`` at the end of each step."""
        if self._state is not None:
            raise RuntimeError("run.state() was called before: a run has one state. Keep what the first call returned.")
        self._state = TrainState(self, strategy=model.strategy, optimizer=optimizer, data=data)
        return self._state

    def steps(self) -> Iterator[int]:
        """The steps still to do, 1 to ``settings.steps``.

        Ends the process with code 75, after a save, at the step at which all ranks agree that one was asked to stop.

        Raises:
            RuntimeError: the loop left out ``state.resume()`` or ``run.step(optimizer)``.
        """
        if self._state is not None and not self._state.resumed:
            raise RuntimeError(
                "Call state.resume() before run.steps(): a run that has checkpoints must not start anew over them."
            )
        self.ranks.set_timeout(self.settings.first_collective_timeout_seconds)  # groups made since start have PyTorch's own
        self.event("started", world=self.ranks.size)
        if self.settings.micro_batch == "auto":
            self._measure_micro_batch()
        if self._state is not None:
            self._state.require_memory()
        first = self.completed + 1
        profiled = ProfiledSteps(self.settings, self.ranks, self._progress, first=first, directory=self._state_directory)
        self._progress.begin(waited=self._waited)
        try:
            self._hear_of_stop(self.ranks.largest([self.stop_flag.urgency()])[0])
            while self.completed < self.settings.steps:
                before = self.completed
                profiled.before(before + 1)
                self._pulse.begin(before + 1)
                yield before + 1
                if self.completed != before + 1:
                    raise RuntimeError(f"Step {before + 1} ended without run.step(optimizer).")
                profiled.after(self.completed)
                self._act_on(self._agreement.answer())
            if self._state is not None and not self._state.save_last():
                self._end_early()
            digest = "" if self._state is None else self._state.finish()
            self._pulse.end(self.completed)
            self._progress.finish(self.completed, skipped=self._skipped, model_sha256=digest)
            atexit.register(leave)  # only after all ranks came here: leaving earlier could wait for peers that are lost
        finally:
            if self._state is not None:
                self._state.close()
            profiled.close()
            self._progress.close()

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradients.

        Args:
            loss: the sum over the micro-batch's valid tokens. It is divided by the step's count of valid tokens over all
                ranks and micro-batches, so that neither their number nor their sizes change the step.

        Raises:
            RuntimeError: the loss is not of the prepared model, or the micro-batch had its backward pass already.
            TypeError: the loss is no tensor.
            ValueError: it has more than one number, or nothing that requires gradients.
        """
        if self._data is None or self._strategy is None:
            raise RuntimeError(
                "Call run.tokens() and run.prepare() before run.backward(): it divides the loss by the step's valid tokens."
            )
        require_loss(loss)
        self._pulse.arrive(self.completed + 1)
        self._passes.backward(self._data.given)
        loss = loss / self._data.valid_tokens
        self._loss += loss.detach()
        with self._advised():
            self._strategy.backward(loss, last=self._data.complete)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip, set the learning rate of this step, update, and move on: data, counters, metrics.

        Raises:
            RuntimeError: the step's micro-batches were not all used, each with its own forward and backward pass; or the
                optimizer is not as it was prepared.
        """
        if self._data is None or self._strategy is None or not self._data.complete:
            raise RuntimeError(
                "Use all of data.micro_batches() before run.step(optimizer): gradients of this step are incomplete."
            )
        require_prepared(optimizer, self._optimizer, groups=len(self._peaks))
        self._passes.end_step(self._data.given)
        saving = () if self._state is None else self._state.before_update()
        self._agreement.ask([self.stop_flag.urgency(), self._save_request.tells(), *saving])
        fraction = schedule(self.completed + 1, steps=self.settings.steps, settings=self.settings.optimizer)
        for group, peak in zip(optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * fraction
        with self._advised():
            self._norm = norm = self._strategy.update(optimizer, clip_norm=self.settings.optimizer.clip_norm or math.inf)
        tokens = self._data.valid_tokens
        self._data.advance()
        self.completed += 1
        self.tokens_done += tokens
        self._progress.step(self.completed, tokens=tokens)
        self._pulse.done(self.completed)
        if self._progress.clock.steps == 1:
            self.ranks.set_timeout(self.settings.collective_timeout_seconds)
        if self._progress.is_due(self.completed):
            self._log(norm, learning_rate=self._peaks[0] * fraction)
        self._loss.zero_()

    def check_finite(self) -> None:
        """Raise when the last gradient was not finite: from then on neither are the parameters.

        Raises:
            FloatingPointError: on all ranks alike, since they have the same gradient.
        """
        norm = float(self._norm)
        if not math.isfinite(norm) and self.settings.precision != "fp16":  # which skipped the step
            step = self.saved_step
            saved = "There is no checkpoint yet" if step is None else f"The newest checkpoint is of step {step}"
            raise FloatingPointError(
                f"The gradient norm at step {self.completed} is {norm}: training has diverged. {saved}. Lower "
                "optimizer.learning_rate, or lengthen optimizer.warmup_steps, and start again."
            )

    def event(self, name: str, *, step: int | None = None, **details: Any) -> None:
        """Record that something happened at a step, by default the present one."""
        self._progress.event(self.completed if step is None else step, name, **details)

    def _log(self, norm: Tensor, *, learning_rate: float) -> None:
        """Bring loss and norm to the host, which waits for the device: once for both, and only at steps that are logged."""
        assert self._data is not None
        loss = self.ranks.sum(self._loss) / self.ranks.tensor_parallel
        loss_here, norm_here = torch.stack([loss, norm.to(loss)]).tolist()
        self._norm = norm_here
        self.check_finite()
        self._progress.report(
            self.completed,
            loss=loss_here,
            learning_rate=learning_rate,
            gradient_norm=norm_here,
            tokens=self.tokens_done,
            waited=self._waited,
            skipped=self._skipped,
            settings=self.settings,
        )

    @property
    def _micro_batch(self) -> int:
        return 1 if self.settings.micro_batch == "auto" else self.settings.micro_batch

    def _require_same(self, description: Described, url: str) -> None:
        fingerprints = self.ranks.gather(description.fingerprint)
        if len(set(fingerprints)) > 1:
            raise ConfigError([f"The ranks see different datasets at {url}: {', '.join(fingerprints)}."])

    @property
    def _waited(self) -> float:
        return 0.0 if self._data is None else self._data.waited

    @property
    def _skipped(self) -> int:
        return 0 if self._strategy is None else self._strategy.skipped

    def _measure_micro_batch(self) -> None:
        if self._data is None or self._strategy is None or self._optimizer is None:
            raise ConfigError(
                ['micro_batch is "auto", which needs run.tokens() and run.prepare() before run.steps(). Or set it to a number.']
            )
        number, measured = fitting_micro_batch(self._strategy, self._optimizer, self._data, self.ranks)
        self._data.set_micro_batch(number)
        self.settings = dataclasses.replace(self.settings, micro_batch=number)
        self._progress.say(said(number, measured, share=self._data.share))
        details: dict[str, Any] = {} if measured is None else {"measured": vars(measured)}
        self.event("micro_batch", sequences=number, share=self._data.share, **details)

    def _advised(self) -> AbstractContextManager[None]:
        return advised(settings=self.settings, step=self.completed + 1, ranks=self.ranks)

    def _passed(self, result: Any) -> None:
        self._passes.forward(0 if self._data is None else self._data.given, result)

    def _last_micro_batch(self) -> bool:
        return self._data is None or self._data.complete

    def _act_on(self, agreed: Sequence[int]) -> None:
        """Do what all ranks do at this step, by what they have told each other."""
        stopping, asked, *saving = agreed or (0, 0)
        self._hear_of_stop(max(stopping, self.stop_flag.urgency() if self.ranks.size == 1 else 0))  # who is alone hears at once
        wanted = self._save_request.hear(asked)
        if self._state is not None and saving:
            self._state.hear(*saving, wanted=wanted)

    def _hear_of_stop(self, urgency: int) -> None:
        """End here when any rank was asked to; at the last step there is nothing to end."""
        self.stop_flag.hear(urgency)
        if self.stop_flag.deadline is not None and self.completed < self.settings.steps:
            self._end_early()

    def _end_early(self) -> None:
        assert self.stop_flag.deadline is not None
        self.event("stopping", seconds_left=round(max(0.0, self.stop_flag.deadline - time.monotonic()), 1))
        if self._state is not None:
            self._state.save_before(self.stop_flag.deadline)
        self._progress.say(f"Asked to stop {self.stop_flag.asked_by()}: ended at step {self.completed} of {self.settings.steps}.")
        atexit.register(leave)
        raise SystemExit(stop.EXIT_CODE)
