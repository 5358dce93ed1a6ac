"""The number formats that a model computes in."""

from __future__ import annotations

import contextlib

import torch

from trainrun.settings.train import Precision


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context in which operations compute in ``precision`` while weights stay in fp32."""
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()
