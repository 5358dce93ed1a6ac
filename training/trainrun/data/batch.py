"""What a model is given."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

IGNORED = -100
"""A target that counts for nothing; every other target is a valid token."""


@dataclass(frozen=True)
class Batch:
    """Sequences of token ids on the rank's device, all int64."""

    inputs: Tensor
    """(sequences, length)"""
    targets: Tensor
    """(sequences, length): the token after each input (or the one that was masked there), or `IGNORED`; (sequences,): the class
    of each."""
    present: Tensor | None = None
    """(sequences, length): 1 for a token, 0 for padding at a sequence's end; None when there is no padding."""
