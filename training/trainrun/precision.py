"""The number formats that a model computes in."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trainrun.config import ConfigError
from trainrun.settings import TrainSettings
from trainrun.settings.train import Precision

COMPUTED_IN: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # all but the matrix products that fp8 is for
}

FIRST_FP8 = (8, 9)
"""Compute capability of the first NVIDIA GPUs with fp8 (Ada, Hopper)."""
FP8_MULTIPLE = 16
"""Both sides of a matrix that is multiplied in fp8 are multiples of it."""


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context in which operations compute in ``precision`` while weights stay in fp32."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=COMPUTED_IN[precision])


def set_tf32(settings: TrainSettings, device: torch.device) -> None:
    """Let fp32 matrix products use TF32, or forbid it.

    Raises:
        ConfigError: TF32 is asked for where there is none.
    """
    if device.type == "cuda" and (not settings.tf32 or torch.cuda.get_device_capability(device) >= (8, 0)):
        torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    elif settings.tf32:
        raise ConfigError(
            [f"tf32 is true, but TF32 is of NVIDIA GPUs from A100 on, and this rank computes on {_name(device)}. Set false."]
        )


def convert_to_fp8(units: Sequence[nn.Module], device: torch.device) -> None:
    """Let the linear layers of ``units`` multiply in fp8, forward and backward, by torchao's dynamic scaling.

    Their weights stay the fp32 parameters that they are. Embedding and output layer, outside the units, are left alone.

    Raises:
        ConfigError: the hardware has no fp8, torchao is not installed, or no layer has sides that are multiples of 16.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FIRST_FP8:
        raise ConfigError(
            [
                f'precision is "fp8", which needs an NVIDIA GPU of compute capability 8.9 or later (L4, L40S, H100, ...). This '
                f'rank computes on {_name(device)}. Set precision to "bf16".'
            ]
        )
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError:
        raise ConfigError(
            ['precision is "fp8", which needs torchao: pip install "traincluster[fp8]". Or set precision to "bf16".']
        ) from None
    converted = 0

    def fits(module: nn.Module, name: str) -> bool:
        nonlocal converted
        found = isinstance(module, nn.Linear) and module.in_features % FP8_MULTIPLE == module.out_features % FP8_MULTIPLE == 0
        converted += found
        return found

    for unit in units:
        convert_to_float8_training(unit, module_filter_fn=fits)
    if not converted:
        raise ConfigError(
            [
                'precision is "fp8", but the repeated layers of this model have no nn.Linear whose sides are multiples of '
                f'{FP8_MULTIPLE}. Set precision to "bf16".'
            ]
        )


def _name(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


class LossScale:
    """The dynamic loss scale of fp16: gradients too small for fp16 are scaled up before they are computed.

    The scale halves when a gradient overflows, and doubles after `INTERVAL` steps without (as `torch.amp.GradScaler`, which
    finds overflows per rank; here the norm of the whole gradient tells, so that all ranks decide alike whatever the sharding).

    Attributes:
        value: what the loss is multiplied by; a power of two.
    """

    FIRST = 2.0**16
    INTERVAL = 2000
    """Steps without overflow after which the scale doubles."""
    SMALLEST = 2.0**-10
    """With gradients of ordinary size fp16 needs a scale of more than 1."""

    def __init__(self) -> None:
        self.value = self.FIRST
        self._steps = 0

    def update(self, *, finite: bool) -> None:
        """Follow one step.

        Raises:
            FloatingPointError: gradients are not finite however small the scale.
        """
        self._steps = self._steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self._steps == self.INTERVAL:
            self.value, self._steps = self.value * 2, 0
        if self.value < self.SMALLEST:
            raise FloatingPointError(
                f"The gradient is not finite even with a loss scale of {2 * self.value:g}: training has diverged. Start again "
                'from the last checkpoint with a lower optimizer.learning_rate, or with precision "bf16".'
            )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"value": self.value, "steps": self._steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.value, self._steps = float(state["value"]), int(state["steps"])
