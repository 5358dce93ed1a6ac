"""The optimizer that the settings name."""

from __future__ import annotations

import torch
from torch import nn

from trainrun.optimizer.adamw import adamw
from trainrun.optimizer.muon import muon
from trainrun.settings import OptimizerSettings


def bundled(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """`adamw` or `muon` over the parameters of ``model`` that are trained, as ``settings.name`` says.

    Raises:
        ConfigError: the model does not suit Muon.
    """
    return muon(model, settings) if settings.name == "muon" else adamw(model, settings)
