"""Models that know nothing of trainrun but the `loss` method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.mark.parametrize("world", [1, 2])
def test_odd_modules_and_buffers_train_and_go_on_after_a_kill(
    world: int, dataset: str, tmp_path: Path, ranks: Any, tiny: list[str]
) -> None:
    common = [*tiny, f"--data={dataset}", "--steps=6", "--checkpoint.every_steps=3", "--strategy=ddp"]
    killed = [*common, f"--checkpoint.location={tmp_path}"]
    whole = ranks("train", world=world, arguments=common, odd=True)
    assert [outcome.code for outcome in whole] == [0] * world, whole[0].log
    ranks("train", world=world, arguments=killed, odd=True, kill_at=5)
    resumed = ranks("train", world=world, arguments=killed, odd=True)
    assert [outcome.code for outcome in resumed] == [0] * world, resumed[0].log
    assert resumed[0].result["resumed"] == 3
    expected, found = whole[0].parameters(), resumed[0].parameters()
    for name, parameter in expected.items():
        assert np.array_equal(found[name], parameter), name
        assert np.array_equal(resumed[-1].parameters()[name], parameter), f"{name} on the last rank"
    assert (expected["frozen"] == 1).all()
    assert expected["scale"] != 1
    losses = whole[0].result["losses"]
    assert losses[-1] < losses[0]
