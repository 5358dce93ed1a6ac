"""A run that goes on, killed each time, with other numbers of ranks sees the data and the learning rates of one that was not."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np


def test_num_07_data_and_rates_are_the_same_on_4_then_2_then_8_ranks(
    ranks: Any, tiny: list[str], dataset: str, tmp_path: Path
) -> None:
    arguments = [*tiny, f"--data={dataset}", "--steps=9", "--checkpoint.every_steps=3", "--micro_batch=1"]
    alone = ranks("train", arguments=arguments)[0]
    straight = alone.result
    arguments.append(f"--checkpoint.location={tmp_path}")
    for world, kill_at in ((4, 5), (2, 8)):
        killed = ranks("train", world=world, arguments=arguments, kill_at=kill_at)
        assert [outcome.code for outcome in killed] == [-signal.SIGKILL] * world, killed[0].log
    last = ranks("train", world=8, arguments=arguments)
    assert [outcome.result.get("resumed") for outcome in last] == [6] * 8, last[0].log
    for outcome in last:
        assert outcome.result["rates"] == straight["rates"][6:]
        assert outcome.result["tokens"] == straight["tokens"]
    for name, value in last[0].parameters().items():  # nor was anything else trained on by 4 and by 2
        np.testing.assert_allclose(value, alone.parameters()[name], atol=2e-4, err_msg=name)
    assert by_step([sample for outcome in last for sample in outcome.result["seen"]]) == by_step(
        [(step, sequences) for step, sequences in straight["seen"] if step > 6]
    )


def by_step(seen: list[Any]) -> dict[int, list[list[int]]]:
    """Ranks take consecutive shares of each step's sequences."""
    steps: dict[int, list[list[int]]] = {}
    for step, sequences in seen:
        steps.setdefault(step, []).extend(sequences)
    return steps
