"""The order of sequences: a permutation for each epoch, found without state."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainrun.data.order import sequence_at


def epoch(number: int, count: int, seed: int) -> list[int]:
    positions = np.arange(number * count, (number + 1) * count, dtype=np.uint64)
    return [int(i) for i in sequence_at(positions, count=count, seed=seed)]


@given(count=st.integers(1, 3000), seed=st.integers(0, 2**63), number=st.integers(0, 2**20))
@settings(max_examples=80, deadline=None)
def test_an_epoch_has_every_sequence_once(count: int, seed: int, number: int) -> None:
    assert sorted(epoch(number, count, seed)) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [epoch(0, 500, 0), epoch(1, 500, 0), epoch(0, 500, 1)]
    for i, order in enumerate(orders):
        assert order != sorted(order)
        for other in orders[:i]:
            assert sum(a == b for a, b in zip(order, other, strict=True)) < 25


def test_an_order_is_shuffled_well() -> None:
    """Neighbours in the order are as far apart in the text as those of a random permutation: a third of it on average."""
    order = np.array(epoch(0, 10_000, 3), dtype=np.float64)
    assert abs(np.abs(np.diff(order)).mean() / 10_000 - 1 / 3) < 0.02
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05


def test_data_07_positions_beyond_32_bits() -> None:
    count = 10**12
    positions = np.array([0, 2**33, count - 1, 5 * count + 2**40], dtype=np.uint64)
    found = sequence_at(positions, count=count, seed=0)
    assert len(set(found.tolist())) == 4
    assert all(index < count for index in found.tolist())
    assert max(found.tolist()) > 2**36
