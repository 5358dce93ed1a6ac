"""torch.compile of a model's units composes with the strategies (and with tensor parallelism: test_tensor_parallel.py)."""

from __future__ import annotations

import pytest
from parity import Configuration, RunsRanks, Trained, check, reference, train_all

COMPILED = ("--compile=true", "--steps=3", "--micro_batch=2")
OFFLOAD = ("--sharding.offload_optimizer=cpu", "--sharding.offload_parameters=cpu")

PARITY = {
    "ddp-fp32": Configuration((*COMPILED, "--strategy=ddp")),
    "ddp-fp16": Configuration((*COMPILED, "--strategy=ddp", "--precision=fp16")),
    "fsdp2-fp32-offload": Configuration((*COMPILED, *OFFLOAD, "--strategy=fsdp2")),
    "fsdp2-bf16-selective": Configuration(
        (*COMPILED, "--strategy=fsdp2", "--precision=bf16", "--activation_checkpointing=selective")
    ),
    "hybrid-bf16-full": Configuration(
        (*COMPILED, "--strategy=fsdp2", "--sharding.shard_size=1", "--precision=bf16", "--activation_checkpointing=full")
    ),
    "zero2-fp32": Configuration((*COMPILED, "--strategy=zero2")),
}
KINDS = {"hybrid": "fsdp2", "zero2": "zero"}


@pytest.fixture(scope="module")
def results(lasting_ranks: RunsRanks, dataset: str) -> dict[str, Trained]:
    return train_all(lasting_ranks, dataset, PARITY, world=2, longest=1500.0)


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("name", PARITY)
def test_compiled_units_take_the_same_steps(results: dict[str, Trained], dataset: str, name: str) -> None:
    kind = name.partition("-")[0]
    check(results[name], reference(dataset, PARITY[name]), KINDS.get(kind, kind), PARITY[name].settings(dataset).precision)
    assert results[name].compiled > 0
