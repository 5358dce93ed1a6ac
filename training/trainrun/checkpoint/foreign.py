"""A checkpoint of another library, as its readers hand it to the conversion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from trainrun.checkpoint.parts import Part


@dataclass(frozen=True)
class Foreign:
    """What is in it. Its tensors come one after the other, so that the whole is never in memory."""

    format: str
    """What wrote it, for people."""
    step: int | None
    """Optimizer steps done; None when it does not say."""
    bytes: int
    """About how much there is to read."""
    parts: Iterator[Part]
    """By the names that trainrun's checkpoints have, weights in fp32."""
    left_out: list[str] = field(default_factory=list)
    """Sentences: what it has that cannot be carried over. Complete once ``parts`` is used up."""
