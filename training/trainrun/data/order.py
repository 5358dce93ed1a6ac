"""The order of training sequences, as a function without state.

Position p (the p-th sequence that the whole run consumes, over all ranks) stands for one sequence of the dataset.
Each epoch goes through all sequences once, in an order of its own, and the next begins where it ends, in the middle
of a batch if need be. Nothing depends on the number of ranks, and position p is found in O(1) after any restart.

The order within an epoch is a keyed permutation: a Feistel network over the smallest power of four that holds all
sequences, applied again to what falls outside. All arithmetic is in 64 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.uint64]]

ROUNDS = 4


def sequence_at(positions: Indices, *, count: int, seed: int) -> Indices:
    """Which of ``count`` sequences stands at each of ``positions``."""
    epochs, places = np.divmod(positions.astype(np.uint64), np.uint64(count))
    keys = _scramble(epochs + _scramble(np.full(epochs.shape, seed % 2**64, dtype=np.uint64)))
    half = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))
    found = _permute(places, keys, half)
    while (outside := found >= count).any():
        found[outside] = _permute(found[outside], keys[outside], half)
    return found


def _permute(places: Indices, keys: Indices, half: np.uint64) -> Indices:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = places >> half, places & mask
    for round_number in range(ROUNDS):
        left, right = right, left ^ (_scramble(right + keys + np.uint64(round_number)) & mask)
    permuted: Indices = (left << half) | right
    return permuted


def _scramble(x: Indices) -> Indices:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit changes every output bit half the time."""
    x = x + _STRIDE
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scrambled: Indices = x ^ (x >> np.uint64(31))
    return scrambled


_STRIDE = np.uint64(0x9E3779B97F4A7C15)
