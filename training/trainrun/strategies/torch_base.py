"""What the strategies of PyTorch itself have in common."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.config import ConfigError
from trainrun.precision import convert_to_fp8, set_tf32
from trainrun.settings import TrainSettings
from trainrun.strategies.compilation import compile_units
from trainrun.strategies.norm import SMALL, gradient_norm, multiply
from trainrun.strategies.recompute import recompute
from trainrun.strategies.torch_state import TorchState
from trainrun.strategies.units import units


class TorchStrategy(TorchState):
    """Gradients in the parameters' own ``grad`` and the user's own optimizer, whatever was done to the model."""

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        names = trained_names(model, optimizer)
        set_tf32(self.settings, self.ranks.device)
        model.float()  # what is updated is fp32; precision is that of the computation
        self.module = model
        self._spread(model, prepare_units(model, self.settings, self.ranks.device))
        put_into(optimizer, names, model)

    @abc.abstractmethod
    def _spread(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        """Put the model on this rank's device, whole or in shards, with rank 0's weights."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        torch.autograd.backward(loss if self.loss_scale is None else loss * self.loss_scale.value)

    def rehearse(self, batch: Any) -> None:
        self.backward(self.call("loss", (batch,), {}, last=True), last=True)

    def update(self, optimizer: torch.optim.Optimizer, *, clip_norm: float) -> Tensor:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = gradient_norm(gradients, self.ranks.device)
        finite, unscale = True, 1.0
        if self.loss_scale is not None:
            unscale = 1 / self.loss_scale.value
            norm = norm * unscale
            finite = math.isfinite(norm)  # waits for the device, which only a precision that skips steps has to
        if finite:
            if clip_norm < math.inf:
                multiply(gradients, (clip_norm / (norm + SMALL)).clamp(max=1.0) * unscale)
            elif unscale != 1.0:
                multiply(gradients, torch.full((), unscale, device=norm.device))
            optimizer.step()
        else:
            self.skipped += 1
        if self.loss_scale is not None:
            self.loss_scale.update(finite=finite)
        optimizer.zero_grad(set_to_none=True)
        return norm


def prepare_units(model: nn.Module, settings: TrainSettings, device: torch.device) -> list[nn.Module]:
    """Let the model's repeated layers compute as the settings say: in fp8, recomputed, compiled. In place, before sharding.

    Returns:
        The units.

    Raises:
        ConfigError: there are none and the settings need some, or this machine cannot do it.
    """
    found = units(model)
    asked = {
        'precision "fp8"': settings.precision == "fp8",
        "activation_checkpointing": settings.activation_checkpointing != "none",
        "compile": settings.compile,
    }
    idle = [name for name, on in asked.items() if on and not found]
    if idle:
        raise ConfigError(
            f"{name} works on a model's repeated layers, and {type(model).__name__} has none (an nn.ModuleList or nn.Sequential "
            "of layers of one class). Put them into an nn.ModuleList, or switch it off."
            for name in idle
        )
    if settings.precision == "fp8":
        convert_to_fp8(found, device)
    if settings.activation_checkpointing != "none":
        recompute(found, selective=settings.activation_checkpointing == "selective")
    if settings.compile:
        compile_units(found)
    return found


def trained_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    """The name in ``model`` of each of the optimizer's parameters.

    Raises:
        ConfigError: the optimizer has taken a step, has parameters that the model has not, or lacks some that are to train.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    problems = []
    if optimizer.state:
        problems.append(
            "The optimizer given to run.prepare() has state already: its steps were taken on other tensors. Give a new one; "
            "state.resume() restores the state of a run."
        )
    strange = [tuple(parameter.shape) for parameter in held if parameter not in names]
    if strange:
        problems.append(
            f"The optimizer given to run.prepare() has {len(strange)} parameters that the model has not, of shapes "
            f"{', '.join(map(str, strange[:3]))}. Make it over the parameters of this model, after the last change to them."
        )
    missing = [name for parameter, name in names.items() if parameter.requires_grad and parameter not in held]
    if missing:
        problems.append(
            f"{len(missing)} parameters of the model require gradients but are not in the optimizer: {', '.join(missing[:3])}. "
            "Add them, or freeze them with requires_grad_(False)."
        )
    if problems:
        raise ConfigError(problems)
    return {parameter: name for parameter, name in names.items() if parameter in held}


def put_into(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], model: nn.Module) -> None:
    """Let the optimizer's groups hold what the model now has under the same names."""
    present = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [present[names[parameter]] for parameter in group["params"]]
