"""Every strategy of PyTorch takes the steps of one plain loop, on 1, 2 and 4 processes."""

from __future__ import annotations

import pytest
from parity import Configuration, RunsRanks, differences, reference, train_all

C = {
    f"{name}-{precision}": Configuration((*arguments, f"--precision={precision}"))
    for precision in ("fp32", "bf16", "fp16")
    for name, arguments in {
        "ddp": ("--strategy=ddp",),
        "fsdp2": ("--strategy=fsdp2",),
        "hybrid": ("--strategy=fsdp2", "--sharding.shard_size=2"),
        "offload": ("--strategy=fsdp2", "--sharding.offload_optimizer=cpu", "--sharding.offload_parameters=cpu"),
    }.items()
}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_strategies_take_the_steps_of_a_plain_loop(ranks: RunsRanks, dataset: str, world: int) -> None:
    for name, trained in train_all(ranks, dataset, C, world=world).items():
        if trained.error:
            print(name, trained.error)
            continue
        print(world, name, trained.skipped, differences(trained, reference(dataset, C[name])))
