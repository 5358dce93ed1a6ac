"""AdamW (Loshchilov and Hutter 2019): PyTorch's, with our settings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainrun.config import ConfigError
from trainrun.settings import OptimizerSettings

FUSED = ("cpu", "cuda", "mps", "xpu")
"""Devices on which PyTorch updates all parameters in one kernel. Elsewhere it chooses for itself."""


def adamw(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW over all parameters that are trained.

    Raises:
        ConfigError: the settings ask for another optimizer.
    """
    if settings.name != "adamw":
        raise ConfigError(
            [
                f"optimizer.name is {settings.name!r}, but this script makes AdamW. Set it to 'adamw', or let the script call "
                "trainrun.optimizer.bundled(model, settings), which makes either."
            ]
        )
    return adamw_over([parameter for parameter in model.parameters() if parameter.requires_grad], settings)


def adamw_over(parameters: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW over ``parameters``: matrices (embeddings among them) decay, vectors and scalars do not."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    device = torch.accelerator.current_accelerator()
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True if device is None or device.type in FUSED else None,
    )
