"""Settings of the optimizer and of the learning rate's schedule."""

from __future__ import annotations

import math
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
    """Steps of linear warm-up. A shorter run ends before its peak."""
    decay_fraction: float = 0.2
    """Part of all steps that the decay of "wsd" takes, at the end; less if the warm-up reaches into it."""
    final_fraction: float = 0.1
    """Learning rate at the last step, as a fraction of the peak; of no use to "constant"."""
    weight_decay: float = 0.1
    """Of matrices, embeddings among them; vectors and scalars (norms, biases) do not decay."""
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
            if not 0 < getattr(self, name) < math.inf:
                problems.append(f"{name} is {getattr(self, name)}. Allowed: more than 0, and finite.")
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                problems.append(f"{name} is {getattr(self, name)}. Allowed: 0 or more, and finite.")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}. Allowed: 0 to less than 1.")
        for name in ("decay_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                problems.append(f"{name} is {getattr(self, name)}. Allowed: 0 to 1.")
        problems += self._of_no_use()
        if problems:
            raise ConfigError(problems)

    def _of_no_use(self) -> list[str]:
        """What was set (is not its default) and would be ignored."""
        used = {
            "decay_fraction": ("schedule", self.schedule == "wsd", "'wsd'"),
            "final_fraction": ("schedule", self.schedule != "constant", "'cosine', 'wsd' or 'linear'"),
            "momentum": ("name", self.name == "muon", "'muon'"),
        }
        return [
            f"{name} is {getattr(self, name)}, but {chooser} is {getattr(self, chooser)!r}, which has no use for it. Remove it, "
            f"or set {chooser} to {users}."
            for name, (chooser, is_used, users) in used.items()
            if not is_used and getattr(self, name) != getattr(OptimizerSettings, name)
        ]
