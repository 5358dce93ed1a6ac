"""A model that ranks split takes the steps of one process: heads, feed-forward columns and vocabulary in parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_ranks import on_each_rank
from parity import Configuration, RunsRanks, Trained, check, reference, train_all
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from trainrun.config import ConfigError
from trainrun.models.gpt import GPT
from trainrun.settings import ModelSettings
from trainrun.strategies.tensor_parallel import split

GPT2 = ("--model.heads=4",)
LLAMA = ("--model.heads=4", "--model.kv_heads=2", "--model.activation=swiglu", "--model.norm_weights=true")
TP2 = ("--strategy=ddp", "--sharding.tensor_parallel=2", *LLAMA)
TP4 = ("--strategy=ddp", "--sharding.tensor_parallel=4", *GPT2)
TP2_FSDP2 = ("--strategy=fsdp2", "--sharding.tensor_parallel=2", *LLAMA)
TP2_HYBRID = (*TP2_FSDP2, "--sharding.shard_size=1")
OFFLOAD = ("--sharding.offload_optimizer=cpu", "--sharding.offload_parameters=cpu")
SHORT = ("--steps=8", "--micro_batch=8")
OVERFLOW = (*SHORT, "--precision=fp16", "--optimizer.clip_norm=1.0")

WHOLE = {
    2: {
        "tp2": Configuration((*TP2, "--micro_batch=4")),  # two micro-batches
    },
    4: {
        "tp4": Configuration((*TP4, "--micro_batch=8")),
        "tp2+fsdp2": Configuration((*TP2_FSDP2, "--micro_batch=2")),  # two micro-batches
        "tp2+fsdp2-bf16": Configuration((*TP2_FSDP2, "--micro_batch=4", "--precision=bf16")),
        "tp2+fsdp2-fp16": Configuration((*TP2_FSDP2, "--micro_batch=4", "--precision=fp16")),
        "tp2+hybrid": Configuration((*TP2_HYBRID, "--micro_batch=4")),
    },
}
"""50 steps."""

VARIANTS = {
    2: {
        "tp2-bf16": Configuration((*TP2, *SHORT, "--precision=bf16")),
        "tp2-uneven": Configuration((*TP2, "--steps=8", "--micro_batch=2"), masked=True),
        "tp2-untied": Configuration((*TP2, *SHORT, "--model.tied=false")),
        "tp2-meta": Configuration((*TP2, *SHORT), meta=True),
        "tp2-full": Configuration((*TP2, *SHORT, "--activation_checkpointing=full")),
        "tp2-selective": Configuration((*TP2, *SHORT, "--activation_checkpointing=selective")),
    },
    4: {
        "tp2+fsdp2-uneven": Configuration((*TP2_FSDP2, "--steps=8", "--micro_batch=2"), masked=True),
        "tp2+fsdp2-meta": Configuration((*TP2_FSDP2, *SHORT, "--model.tied=false"), meta=True),
        "tp2+fsdp2-offload": Configuration((*TP2_FSDP2, *SHORT, *OFFLOAD)),
        "tp2+fsdp2-offload-bf16": Configuration((*TP2_FSDP2, *SHORT, *OFFLOAD, "--precision=bf16")),
        "tp2+fsdp2-offload-fp16": Configuration((*TP2_FSDP2, *SHORT, *OFFLOAD, "--precision=fp16")),
        "tp2+fsdp2-full": Configuration((*TP2_FSDP2, *SHORT, "--activation_checkpointing=full")),
        "tp2+fsdp2-selective": Configuration((*TP2_FSDP2, *SHORT, "--activation_checkpointing=selective")),
        "tp2+fsdp2-frozen": Configuration((*TP2_FSDP2, *SHORT), frozen=("embedding.weight", "blocks.0.attention.keys.weight")),
    },
}

OVERFLOWS = {
    2: {"tp2-overflow": Configuration((*TP2, *OVERFLOW), overflow_at=3)},
    4: {"tp2+fsdp2-overflow": Configuration((*TP2_FSDP2, *OVERFLOW), overflow_at=3)},
}

COMPILED = {
    "tp2-compiled": Configuration((*TP2, *SHORT, "--compile=true")),
    "tp2+fsdp2-compiled": Configuration((*TP2_FSDP2, *SHORT, "--compile=true")),
}

PARITY = {**WHOLE[2], **WHOLE[4], **VARIANTS[2], **VARIANTS[4], **OVERFLOWS[2], **OVERFLOWS[4], **COMPILED}

REFUSED = {
    2: {"kv_heads": Configuration((*TP2, "--model.kv_heads=1"))},
    4: {"replicas": Configuration(TP2), "heads": Configuration((*TP4, "--model.heads=2", "--model.feed_forward=10"))},
}

Results = Callable[[int], dict[str, Trained]]


@pytest.fixture(scope="module")
def results(lasting_ranks: RunsRanks, dataset: str) -> Results:
    """All configurations for a number of processes, trained once."""
    found: dict[int, dict[str, Trained]] = {}

    def results(world: int) -> dict[str, Trained]:
        if world not in found:
            configurations = {**WHOLE[world], **VARIANTS[world], **OVERFLOWS[world], **REFUSED[world]}
            found[world] = train_all(lasting_ranks, dataset, configurations, world=world, longest=280.0)
        return found[world]

    return results


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in (2, 4) for name in (*WHOLE[world], *VARIANTS[world])])
def test_the_steps_are_those_of_a_plain_loop(results: Results, dataset: str, world: int, name: str) -> None:
    configuration = {**WHOLE[world], **VARIANTS[world]}[name]
    check(results(world)[name], reference(dataset, configuration), "tp", configuration.settings(dataset).precision)


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in (2, 4) for name in OVERFLOWS[world]])
def test_num_04_an_infinite_gradient_on_one_of_the_ranks_that_split_skips_the_step_on_all(
    results: Results, dataset: str, world: int, name: str
) -> None:
    trained = results(world)[name]
    assert [step for step, norm in enumerate(trained.norms, 1) if not np.isfinite(norm)] == [3]
    assert trained.kept
    assert trained.skipped == 1
    check(trained, reference(dataset, OVERFLOWS[world][name], skip=[3]), "tp", "fp16")


@pytest.mark.parametrize(
    ("world", "name", "message"),
    [
        (2, "kv_heads", "2, which does not divide the model's 4 heads, 1 kv_heads and 64 feed_forward columns. Allowed for this"),
        (4, "heads", "4, which does not divide the model's 2 heads, 2 kv_heads and 10 feed_forward columns. Allowed for this"),
        (
            4,
            "replicas",
            'on 4 ranks: there are no replicas of a model that is split. Allowed: tensor_parallel 1 or 4, or strategy "f',
        ),
    ],
)
def test_what_cannot_be_split_is_refused_with_what_can(results: Results, world: int, name: str, message: str) -> None:
    assert message in results(world)[name].error


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), [(2, "tp2-compiled"), (4, "tp2+fsdp2-compiled")])
def test_a_split_model_compiles(lasting_ranks: RunsRanks, dataset: str, world: int, name: str) -> None:
    trained = train_all(lasting_ranks, dataset, {name: COMPILED[name]}, world=world, longest=280.0)[name]
    check(trained, reference(dataset, COMPILED[name]), "tp", "fp32")


def test_ranks_that_split_read_the_same_data_draw_the_same_numbers_and_count_once(
    ranks: Any, dataset: str, tiny: list[str]
) -> None:
    arguments = [*tiny, f"--data={dataset}", "--strategy=ddp", "--steps=3"]
    (alone,) = ranks("train", arguments=arguments, dropout=True)
    both = ranks("train", world=2, arguments=[*arguments, "--sharding.tensor_parallel=2"], dropout=True)
    assert [outcome.code for outcome in both] == [0, 0], both[0].log
    for outcome in both:
        assert outcome.result["seen"] == alone.result["seen"]
        assert outcome.result["tokens"] == alone.result["tokens"]
        np.testing.assert_allclose(outcome.result["losses"], alone.result["losses"], rtol=1e-6)
        for name, whole in alone.parameters().items():
            np.testing.assert_allclose(outcome.parameters()[name], whole, atol=1e-5)
    np.testing.assert_allclose(logged_losses(both[0].folder), logged_losses(alone.folder), rtol=1e-6)


def logged_losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for path in sorted((folder / "state/metrics").iterdir()) for line in path.open()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 3
    return losses


def test_a_model_that_does_not_say_how_is_refused() -> None:
    def refused(_: Any) -> None:
        with pytest.raises(
            ConfigError, match=r"tensor_parallel is 2, but Linear does not say how it is to be split\. Allowed: 1, "
        ):
            split(nn.Linear(2, 2), init_device_mesh("cpu", (2,)))

    on_each_rank(2, refused)


class Planned(nn.Module):
    """Says how its layer is split."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 4)])
        self.word = word

    def tensor_parallel_plan(self, ranks: int) -> dict[str, str]:
        return {"layers.0": self.word, "layers.*": "rows"}


def test_a_plan_with_an_unknown_word_is_refused() -> None:
    def refused(_: Any) -> None:
        with pytest.raises(
            ConfigError, match=r"plan says 'column' for layers\.0\. Allowed: 'columns', 'columns, gathered', 'rows'"
        ):
            split(Planned("column"), init_device_mesh("cpu", (2,)))

    on_each_rank(2, refused)


def test_the_first_pattern_that_matches_counts() -> None:
    def shapes(_: Any) -> list[tuple[int, ...]]:
        model = Planned("columns")
        split(model, init_device_mesh("cpu", (2,)))
        return [tuple(parameter.to_local().shape) for parameter in model.parameters()]

    assert on_each_rank(2, shapes) == [[(3, 4), (3,), (4, 3), (4,)]] * 2  # biases of rows are whole


@pytest.mark.parametrize("tied", [True, False])
def test_each_rank_has_its_part_and_tied_weights_stay_tied(tied: bool) -> None:
    settings = ModelSettings(layers=1, width=16, heads=4, kv_heads=2, norm_weights=True, tied=tied)

    def parts(_: Any) -> int:
        torch.manual_seed(0)
        model = GPT(settings, vocabulary=51, context=8)
        whole = sum(p.numel() for p in model.parameters() if p.dim() == 2)
        split(model, init_device_mesh("cpu", (2,)))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert (model.head.weight is model.embedding.weight) == tied
        vectors = [p.to_local() for p in model.parameters() if p.dim() == 1]
        assert all(vector.shape == (16,) for vector in vectors)
        local = sum(p.to_local().numel() for p in model.parameters() if p.dim() == 2)
        assert abs(local - whole / 2) <= 16, "half of every matrix, up to a row of the odd vocabulary"
        return whole - local

    on_each_rank(2, parts)
