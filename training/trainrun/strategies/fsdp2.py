"""Parameters, gradients and optimizer state sharded over the ranks by PyTorch's ``fully_shard`` (FSDP2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from trainrun.config import ConfigError
from trainrun.models.weights import Weights, give_buffers_memory, on_meta, weights_of
from trainrun.precision import COMPUTED_IN, autocast
from trainrun.strategies.base import copy_from_first
from trainrun.strategies.divisible import indivisible
from trainrun.strategies.mesh import data_mesh, mesh_of
from trainrun.strategies.methods import Methods
from trainrun.strategies.tensor_parallel import split
from trainrun.strategies.torch_base import TorchStrategy


class FSDP2(TorchStrategy):
    """Each unit's parameters are gathered before its use and let go after it; gradients are summed into shards.

    With ``sharding.shard_size`` the shards lie on so many neighbouring ranks, and the others have replicas of them. With
    offload the shards of parameters, gradients and optimizer state lie in the CPU's memory, where they are updated.
    """

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        problems = indivisible(model, self.settings.strategy)
        if problems:
            raise ConfigError(problems)
        super().prepare(model, optimizer)

    def _spread(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        self.mesh = mesh_of(self.ranks, shard_size=self.settings.sharding.shard_size)
        weights = weights_of(model, self.weights) if on_meta(model) else None
        copy_from_first(model)
        if self.ranks.tensor_parallel > 1:
            split(model, self.mesh["tensor"])
        offloaded = self.settings.sharding.offload_parameters == "cpu"
        # Autocast decides what each operation computes in, as it does for ddp; parameters travel in what they are used in.
        policy: dict[str, Any] = {
            "mesh": data_mesh(self.mesh),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=COMPUTED_IN[self.settings.precision], reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.ranks.device.type != "cpu") if offloaded else OffloadPolicy(),
        }
        for unit in units:
            fully_shard(unit, **policy)
        self._root: FSDPModule = fully_shard(Methods(model), **policy)
        for module in self._root.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # the sum over the ranks is wanted, not the mean ...
                module.set_force_sum_reduction_for_comms(True)  # ... by an operation that gloo has too
        if weights is not None:
            self._give_memory(model, weights, torch.device("cpu") if offloaded else self.ranks.device)

    def _give_memory(self, model: nn.Module, weights: Weights, home: torch.device) -> None:
        """Put shards that are on the meta device onto ``home``, each rank reading what is its own."""
        give_buffers_memory(model, weights, self.ranks.device)
        shards = {f"model/{name}" for name, parameter in model.named_parameters() if parameter.is_meta}
        self._root._apply(lambda tensor: torch.empty_like(tensor, device=home) if tensor.is_meta else tensor)
        with torch.no_grad():
            for part in self.model_parts():
                if part.name in shards:
                    box = tuple(slice(start, stop) for start, stop in part.box)
                    part.local.copy_(weights.read(part.name.removeprefix("model/"), box))

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, last: bool) -> Any:
        # Each micro-batch's gradients are summed into shards, for keeping them whole until the last would take the memory
        # that sharding saves; only the sum over replicas waits.
        self._root.set_requires_all_reduce(last)
        self._root.set_is_last_backward(last)
        with autocast(self.settings.precision, self.ranks.device):
            result = self._root(method, *args, **kwargs)  # type: ignore[operator]
        if not torch.is_grad_enabled():
            self._root.reshard()  # the root waits with it for a backward pass
        return result
