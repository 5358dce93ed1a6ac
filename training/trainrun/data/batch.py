"""What a model is given."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

IGNORED = -100
"""A target that counts for nothing; every other target is a valid token."""


@dataclass(frozen=True)
class Batch:
    """Sequences of token ids, (sequences, length) int64 each, on the rank's device."""

    inputs: Tensor
    targets: Tensor
    """The token after each input, or `IGNORED`."""
