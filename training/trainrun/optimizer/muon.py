"""Muon (Jordan et al. 2024) for the matrices of a model's blocks, AdamW for all else, as one optimizer.

Muon's update of a matrix is its momentum, orthogonalised: PyTorch's `torch.optim.Muon`, except that a matrix may be a DTensor
whose shards are on several ranks. PyTorch's own would run each product of the Newton-Schulz iteration over the shards: 16
collectives per matrix, and sums that are rounded to bf16 per shard, so that the result depends on the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim._muon import (  # private; a test compares with torch.optim.Muon
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from trainrun.config import ConfigError
from trainrun.optimizer.adamw import adamw_over
from trainrun.settings import OptimizerSettings
from trainrun.strategies.units import units


def muon(model: nn.Module, settings: OptimizerSettings) -> MuonAdamW:
    """Muon over the matrices of the model's blocks, AdamW over embedding, head, vectors and scalars.

    Raises:
        ConfigError: the settings ask for another optimizer, or the model has no matrices in repeated blocks.
    """
    if settings.name != "muon":
        raise ConfigError(
            [
                f"optimizer.name is {settings.name!r}, but this script makes Muon. Set it to 'muon', or let the script call "
                "trainrun.optimizer.bundled(model, settings), which makes either."
            ]
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    in_blocks = {parameter for unit in units(model) for parameter in unit.parameters()}
    matrices = [parameter for parameter in trained if parameter in in_blocks and parameter.dim() == 2]
    others = [parameter for parameter in trained if parameter not in set(matrices)]
    if not matrices or not others:
        raise ConfigError(
            [
                f"optimizer.name is 'muon', but {type(model).__name__} has {len(matrices)} matrices inside its repeated blocks "
                f"and {len(others)} other parameters that train. Muon needs both: use 'adamw' for this model."
            ]
        )
    return MuonAdamW(matrices, adamw_over(others, settings), settings)


class MuonAdamW(torch.optim.Optimizer):
    """Two optimizers in one: its first group is Muon's, the others are AdamW's, and ``state`` is that of both.

    The learning rate means the same to both: Muon's is scaled by 0.2 sqrt(larger side), which gives its updates the
    root mean square that those of AdamW have (Liu et al. 2025, "Muon is scalable for LLM training").

    Args:
        matrices: two-dimensional parameters.
        adamw: over all others, and without state.
        settings: learning rate, weight decay and momentum of Muon.
    """

    def __init__(self, matrices: list[nn.Parameter], adamw: torch.optim.AdamW, settings: OptimizerSettings) -> None:
        first = {
            "params": matrices,
            "lr": settings.learning_rate,
            "weight_decay": settings.weight_decay,
            "momentum": settings.momentum,
        }
        super().__init__([first, *adamw.param_groups], {})
        self._adamw = adamw
        self._adamw.param_groups = []  # a strategy may still put other parameters into the groups here

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "the loop has computed the gradients already"
        first, *others = self.param_groups
        for parameter in first["params"]:
            if parameter.grad is not None:
                self._step_matrix(parameter, parameter.grad, first)
        self._adamw.param_groups, self._adamw.state = others, self.state
        self._adamw.step()

    def _step_matrix(self, matrix: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(average, group["momentum"])  # Nesterov's
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(orthogonalized(ahead), alpha=-_adjust_lr(group["lr"], "match_rms_adamw", matrix.shape))


def orthogonalized(matrix: Tensor) -> Tensor:
    """About the nearest orthogonal matrix, in bf16; of a DTensor the whole is gathered for it, and this rank's shard returned."""
    if not isinstance(matrix, DTensor):
        return _zeropower_via_newtonschulz(matrix, (DEFAULT_A, DEFAULT_B, DEFAULT_C), DEFAULT_NS_STEPS, EPS)
    mesh = matrix.device_mesh
    whole = DTensor.from_local(orthogonalized(_gathered(matrix)), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=matrix.placements)


def _gathered(matrix: DTensor) -> Tensor:
    """All of it. One dimension of the mesh after the other, which `DTensor.full_tensor` does too, but warns of."""
    for done in range(1, matrix.device_mesh.ndim + 1):
        matrix = matrix.redistribute(placements=[Replicate()] * done + list(matrix.placements[done:]))
    return matrix.to_local()
