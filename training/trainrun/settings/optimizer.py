"""Settings of the optimizer and of the learning rate's schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainrun.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The optimizer, and the learning rate as a function of the step alone."""

    name: Literal["adamw", "muon"] = "adamw"
    """Muon updates the matrices of the blocks, AdamW all else."""
    learning_rate: float = 3e-3
    """The peak."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """After the warm-up: cosine or linear decay to the end; warm-up, stable, decay (a plateau, then linear decay); constant."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    decay_fraction: float = 0.2
    """Part of all steps that the decay of "wsd" takes, at the end."""
    final_fraction: float = 0.1
    """Learning rate at the last step, as a fraction of the peak."""
    weight_decay: float = 0.1
    """Of matrices; vectors and scalars (norms, biases) do not decay."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    momentum: float = 0.95
    """Of Muon."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""

    def __post_init__(self) -> None:
        problems = []
        for name in ("learning_rate", "epsilon"):
            if not getattr(self, name) > 0:
                problems.append(f"{name} is {getattr(self, name)}. Allowed: more than 0.")
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            if not getattr(self, name) >= 0:
                problems.append(f"{name} is {getattr(self, name)}. Allowed: 0 or more.")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}. Allowed: 0 to less than 1.")
        for name in ("decay_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                problems.append(f"{name} is {getattr(self, name)}. Allowed: 0 to 1.")
        if problems:
            raise ConfigError(problems)
