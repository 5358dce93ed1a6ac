"""Ranks that restore and save one checkpoint after the other, by every strategy: what `test_resharding` runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainrun.checkpoint.digest import gathered, tensors_digest
from trainrun.config import ConfigError
from trainrun.errors import CheckpointError
from trainrun.models.gpt import GPT
from trainrun.optimizer import bundled
from trainrun.ranks import Ranks, join, seed_everything
from trainrun.run import Run
from trainrun.settle import settle


class Odd(nn.Module):
    """A frozen parameter, and one with fewer elements than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)
        self.few = nn.Parameter(torch.randn(3))

    def forward(self) -> torch.Tensor:
        return self.few.sum()


class OddGPT(GPT):
    """The bundled GPT with what is not like the rest of it, and a buffer."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.odd = Odd()
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def loss(self, batch: Any) -> Any:
        self.seen += 1
        return super().loss(batch) + self.odd()


def run_rank(out: Path, *, stages: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The program of one rank.

    Args:
        stages: by name, in this order: ``arguments`` of a run, and ``train``, steps to do after it resumed (0).
    """
    joined = join(timeout_seconds=60.0, storage_timeout_seconds=60.0)
    results = {}
    for name, stage in stages.items():
        print(f"stage {name}", flush=True)
        try:
            results[name] = _stage(joined, stage["arguments"], stage.get("train", 0))
        except (ConfigError, CheckpointError) as error:
            results[name] = {"error": str(error)}
    return results


def _stage(joined: Ranks, arguments: list[str], train: int) -> dict[str, Any]:
    settings = settle(None, arguments)
    run = Run(settings, dataclasses.replace(joined, tensor_parallel=settings.sharding.tensor_parallel), None)
    data = run.tokens()
    seed_everything(joined.rank)  # other weights on each rank, and other ones than the checkpoint's
    gpt = OddGPT(settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    model, optimizer = run.prepare(gpt, bundled(gpt, settings.optimizer))
    state = run.state(model=model, optimizer=optimizer, data=data)
    result: dict[str, Any] = {"resumed": state.resume(), "losses": []}
    for _ in range(train):
        total = torch.zeros(())
        for batch in data.micro_batches():
            loss = model.loss(batch)
            total += loss.detach()
            run.backward(loss)
        run.step(optimizer)
        result["losses"].append(float(joined.sum(total)) / run.ranks.tensor_parallel)
        state.save()
    state.wait()
    state.close()
    result["digest"] = _digest(run, model, optimizer)
    result["values"] = model.strategy.values(optimizer)
    return result


def _digest(run: Run, model: Any, optimizer: Any) -> str:
    """Of all weights, buffers and moments; told to rank 0."""
    parts = [*model.strategy.model_parts(), *model.strategy.optimizer_parts(optimizer)]
    return tensors_digest(gathered(parts, run.ranks))
