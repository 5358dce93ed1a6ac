"""Every strategy of PyTorch takes the steps of one plain loop, on 1, 2 and 4 processes."""

from __future__ import annotations

import pytest
from parity import Configuration, RunsRanks, check, reference, train_all


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_strategies_take_the_steps_of_a_plain_loop(ranks: RunsRanks, dataset: str, world: int) -> None:
    configurations = {"ddp": Configuration(("--strategy=ddp",))}
    for trained in train_all(ranks, dataset, configurations, world=world).values():
        print(check(trained, reference(dataset, configurations["ddp"]), "ddp", "fp32"))
