"""A GPT that trains by trainrun's loop, one step at a time, with a save in between by whatever way."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import trainrun
from trainrun.data.batch import Batch
from trainrun.data.write import find_documents, write_dataset
from trainrun.models.gpt import GPT
from trainrun.optimizer import adamw
from trainrun.ranks import require_group

WIDTH, HEADS = 768, 12
PARAMETERS_A_LAYER = 12 * WIDTH**2

T = TypeVar("T")


class Model(GPT):
    """A GPT whose steps may be cut short: then only the embedding trains, and all else stays as it is."""

    short = False

    def loss(self, batch: Batch) -> Tensor:
        return self.embedding(batch.inputs).square().sum() if self.short else super().loss(batch)


class Trainer:
    """One rank of a run."""

    def __init__(self, folder: Path, location: str, *, parameters: float, sequence_length: int, ranks: int) -> None:
        layers = max(1, round(parameters * 1e6 / PARAMETERS_A_LAYER))
        run = self.run = trainrun.start(
            arguments=[
                *(f"--data={folder / 'dataset'}", "--steps=1000000", "--log_every=1000000", "--strategy=ddp"),
                *(f"--sequence_length={sequence_length}", f"--batch_tokens={ranks * sequence_length}", "--micro_batch=1"),
                *(f"--model.layers={layers}", f"--model.width={WIDTH}", f"--model.heads={HEADS}"),
                *(f"--checkpoint.location={location}", "--checkpoint.every_steps=1"),
            ]
        )
        self.data = run.tokens()
        self.gpt = Model(run.settings.model, vocabulary=self.data.vocabulary, context=sequence_length)
        self.model, self.optimizer = run.prepare(self.gpt, adamw(self.gpt, run.settings.optimizer))
        self.state = run.state(model=self.model, optimizer=self.optimizer, data=self.data)
        self.state.resume()
        require_group(run.ranks.device)  # DCP's asynchronous saves need one, if only of one rank
        self.group = dist.new_group(backend="gloo")
        """For the benchmark's own agreements, and for threads of DCP, which would hang on the training's group."""
        self.before_update: Callable[[], object] = lambda: None
        self.stalled = 0.0
        """Seconds in which training waited for a save, since someone set it to 0."""
        self._steps = self._loop()

    @property
    def tensors(self) -> list[Tensor]:
        """All that a checkpoint of the whole holds."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        return [*(parameter.detach() for parameter in self.gpt.parameters()), *state]

    def step(self) -> float:
        """Train for one step; its seconds."""
        began = time.perf_counter()
        next(self._steps)
        return time.perf_counter() - began

    def stall(self, call: Callable[[], T]) -> T:
        """Make a call for which training waits."""
        began = time.perf_counter()
        try:
            return call()
        finally:
            self.stalled += time.perf_counter() - began

    def all_agree(self, here: bool) -> bool:
        """Whether it is so on all ranks."""
        if self.run.ranks.size == 1:
            return here
        flag = torch.tensor([int(here)])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.group)
        return bool(flag)

    def _loop(self) -> Iterator[None]:
        for _ in self.run.steps():
            for batch in self.data.micro_batches():
                self.run.backward(self.model.loss(batch))
            self.stall(self.before_update)
            self.run.step(self.optimizer)
            yield


def write_tokens(folder: Path) -> None:
    """A dataset of random bytes: what is learnt does not matter here."""
    (folder / "text").write_bytes(random.Random(0).randbytes(1_000_000))
    write_dataset(find_documents([str(folder / "text")]), str(folder / "dataset"), held_out=0)
