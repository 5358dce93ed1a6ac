"""Rotary positions (Su et al. 2021): attention sees how far apart two tokens are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainrun.settings import ModelSettings

TRAINED_CONTEXT = 8192
"""Of Llama 3, from which Llama 3.1 and 3.2 stretch their positions."""
LOW, HIGH = 1.0, 4.0
"""Turns within that context: below LOW a frequency is divided by the whole factor, above HIGH it is left alone."""


def rotations(context: int, settings: ModelSettings) -> tuple[Tensor, Tensor]:
    """Cosines and sines (context, size / 2) of the angles by which position turns each pair of a head's dimensions."""
    size = settings.width // settings.heads
    frequencies = settings.rope_base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    if settings.rope_scaling != 1:
        frequencies = stretch(frequencies, settings.rope_scaling)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def stretch(frequencies: Tensor, factor: float) -> Tensor:
    """Slow the slow rotations down, so that a context ``factor`` times as long has no angle that was not trained on.

    The "llama3" scaling that Llama 3.1 was published with, by its constants.
    """
    turns = TRAINED_CONTEXT * frequencies / (2 * math.pi)
    kept = ((turns - LOW) / (HIGH - LOW)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the pairs (i, i + size / 2) of the last dimension."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).type_as(x)
