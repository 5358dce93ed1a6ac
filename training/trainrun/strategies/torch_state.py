"""The state of strategies whose models and optimizers consist of plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from trainrun.checkpoint import tensors
from trainrun.checkpoint.parts import Part
from trainrun.strategies.base import Strategy


class TorchState(Strategy):
    """What a strategy needs for its checkpoints.

    Attributes:
        mesh: all ranks, with names: "replicate" (outermost), "shard", "tensor", as far as there are any of them. None
            when no tensor is a DTensor.
    """

    mesh: DeviceMesh | None = None

    def model_parts(self) -> list[Part]:
        return tensors.model_parts(self.module, self._arrangement)

    def optimizer_parts(self, optimizer: torch.optim.Optimizer) -> list[Part]:
        return tensors.optimizer_parts(optimizer, self.module, self._arrangement)

    def optimizer_targets(self, optimizer: torch.optim.Optimizer, wanted: tensors.Named) -> list[Part]:
        return tensors.optimizer_targets(optimizer, self.module, wanted, self._arrangement)

    def values(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {**super().values(optimizer), **tensors.optimizer_values(optimizer, self.module)}

    def load_values(self, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
        super().load_values(optimizer, values)
        tensors.load_optimizer_values(optimizer, self.module, values)

    def mesh_sizes(self) -> dict[str, int]:
        if self.mesh is None:
            return {"replicate": self.ranks.size}
        assert self.mesh.mesh_dim_names is not None
        return dict(zip(self.mesh.mesh_dim_names, self.mesh.shape, strict=True))

    @property
    def _arrangement(self) -> tensors.Arrangement:
        return tensors.Arrangement(self.ranks, self.mesh)
