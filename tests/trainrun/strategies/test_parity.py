"""The strategies of PyTorch take the steps of one plain loop, on 1, 2 and 4 processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from parity import Configuration, RunsRanks, Trained, check, reference, train_all

DDP = ("--strategy=ddp",)
FSDP2 = ("--strategy=fsdp2",)
HYBRID = ("--strategy=fsdp2", "--sharding.shard_size=2")
OFFLOAD = ("--sharding.offload_optimizer=cpu", "--sharding.offload_parameters=cpu")
SHORT = ("--steps=8",)
FP16 = ("--precision=fp16",)

WHOLE = {
    f"{name}-{precision}": Configuration((*arguments, f"--precision={precision}", "--micro_batch=2"))
    for precision in ("fp32", "bf16", "fp16")
    for name, arguments in {"ddp": DDP, "fsdp2": FSDP2, "hybrid": HYBRID, "fsdp2-offload": (*FSDP2, *OFFLOAD)}.items()
}
"""50 steps, fp32 on 1, 2 and 4 processes, the others on 2, and hybrid, of two replicas, on 4 as well."""

ACCUMULATION = {
    f"{name}-{micro_batches}-micro-batches": Configuration(
        (*arguments, "--batch_tokens=256", f"--micro_batch={16 // micro_batches}", *SHORT)
    )
    for name, arguments in {"ddp": DDP, "fsdp2": FSDP2}.items()
    for micro_batches in (1, 4)
}
"""Numbers are those of one process; `on` gives as many to each of several."""

OVERFLOW = {
    f"{name}-overflow": Configuration((*arguments, *FP16, *SHORT, "--micro_batch=2", "--optimizer.clip_norm=1.0"), overflow_at=3)
    for name, arguments in {"ddp": DDP, "fsdp2": FSDP2, "hybrid": HYBRID, "fsdp2-offload": (*FSDP2, *OFFLOAD)}.items()
}

VARIANTS = {
    **{
        f"{name}-uneven": Configuration((*arguments, *SHORT), masked=True)
        for name, arguments in {"ddp": DDP, "fsdp2": FSDP2, "hybrid": HYBRID}.items()
    },
    **{
        f"{name}-{kind}": Configuration((*arguments, *SHORT, f"--activation_checkpointing={kind}"))
        for name, arguments in {"ddp": DDP, "fsdp2": FSDP2}.items()
        for kind in ("selective", "full")
    },
    **{
        f"{name}-frozen": Configuration((*arguments, *SHORT), frozen=("embedding.weight", "blocks.0.attention.keys.weight"))
        for name, arguments in {"ddp": DDP, "fsdp2": FSDP2}.items()
    },
    **{
        f"{name}-meta": Configuration((*arguments, *SHORT, "--model.tied=false"), meta=True)
        for name, arguments in {"ddp": DDP, "fsdp2": FSDP2, "hybrid": HYBRID, "fsdp2-offload": (*FSDP2, *OFFLOAD)}.items()
    },
    **{
        f"hybrid-offload-{precision}": Configuration((*HYBRID, *OFFLOAD, *SHORT, f"--precision={precision}"))
        for precision in ("fp32", "bf16", "fp16")
    },
    "fsdp2-unclipped": Configuration((*FSDP2, *SHORT, "--optimizer.clip_norm=0")),
}

PARITY = {**WHOLE, **ACCUMULATION, **OVERFLOW, **VARIANTS}

Results = Callable[[int], dict[str, Trained]]


def on(world: int) -> dict[str, Configuration]:
    """What is trained on so many processes."""
    whole = {name: each for name, each in WHOLE.items() if world == 2 or "fp32" in name or (world == 4 and "hybrid" in name)}
    overflow = {name: each for name, each in OVERFLOW.items() if world == 2 or (world == 4 and "hybrid" in name)}
    chosen = {**whole, **overflow, **(VARIANTS if world == 4 else {})}
    two_replicas = {name: _changed(each, "--sharding.shard_size=", lambda _: max(1, world // 2)) for name, each in chosen.items()}
    shared = {name: _changed(each, "--micro_batch=", lambda size: size // world) for name, each in ACCUMULATION.items()}
    return {**two_replicas, **shared}


def _changed(configuration: Configuration, argument: str, change: Callable[[int], int]) -> Configuration:
    arguments = [
        f"{argument}{change(int(each.removeprefix(argument)))}" if each.startswith(argument) else each
        for each in configuration.arguments
    ]
    return dataclasses.replace(configuration, arguments=tuple(arguments))


@pytest.fixture(scope="module")
def results(lasting_ranks: RunsRanks, dataset: str) -> Results:
    """All configurations for a number of processes, trained once."""
    found: dict[int, dict[str, Trained]] = {}

    def results(world: int) -> dict[str, Trained]:
        if world not in found:
            found[world] = train_all(lasting_ranks, dataset, on(world), world=world, longest=280.0)
        return found[world]

    return results


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world in (1, 2, 4) for name in on(world) if name not in (*ACCUMULATION, *OVERFLOW)]
)
def test_the_steps_are_those_of_a_plain_loop(results: Results, dataset: str, world: int, name: str) -> None:
    settings = PARITY[name].settings(dataset)
    check(results(world)[name], reference(dataset, PARITY[name]), settings.strategy, settings.precision)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", ACCUMULATION)
def test_num_02_learning_rates_follow_the_step_whatever_ranks_and_accumulation(
    results: Results, dataset: str, world: int, name: str
) -> None:
    expected, trained = reference(dataset, PARITY[name]), results(world)[name]
    check(trained, expected, name.partition("-")[0], "fp32")
    assert trained.rates == results(1)[next(iter(ACCUMULATION))].rates  # exactly


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in (2, 4) for name in on(world) if name in OVERFLOW])
def test_num_04_an_infinite_gradient_on_one_rank_skips_the_step_on_all(
    results: Results, dataset: str, world: int, name: str
) -> None:
    trained = results(world)[name]
    assert [step for step, norm in enumerate(trained.norms, 1) if not np.isfinite(norm)] == [3]
    assert trained.kept
    assert (trained.skipped, trained.loss_scale) == (1, 2.0**15)
    check(trained, reference(dataset, PARITY[name], skip=[3]), name.split("-")[0].replace("hybrid", "fsdp2"), "fp16")


def test_shards_that_do_not_divide_the_ranks_are_refused(lasting_ranks: RunsRanks, dataset: str) -> None:
    configuration = Configuration(("--strategy=fsdp2", "--sharding.shard_size=3"))
    trained = train_all(lasting_ranks, dataset, {"refused": configuration}, world=2)["refused"]
    assert trained.error == "sharding.shard_size is 3, which does not divide 2 ranks. Allowed: 0 (all), 1, 2."
