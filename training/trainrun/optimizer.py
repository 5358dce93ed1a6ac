"""The bundled optimizer, and the learning rate as a function of the step alone.

A schedule that is stepped goes wrong when it is stepped once per process or is not restored; a function cannot.
"""

from __future__ import annotations

import math

import torch

from trainrun.settings import OptimizerSettings


def adamw(model: torch.nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW over all parameters; matrices decay, vectors and scalars do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        fused=True,
    )


def schedule(step: int, *, steps: int, settings: OptimizerSettings) -> float:
    """The fraction of the peak learning rate at ``step`` (1 to ``steps``): linear warm-up, then cosine decay."""
    if step <= settings.warmup_steps:
        return step / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    return settings.final_fraction + (1 - settings.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))
