"""A replica on every rank: PyTorch's DistributedDataParallel, or nothing around the model when the process is alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainrun.models.weights import give_memory, on_meta, weights_of
from trainrun.precision import autocast
from trainrun.strategies.methods import Methods
from trainrun.strategies.torch_state import TorchState


class DDP(TorchState):
    """Replicas whose gradients are averaged over the ranks while the backward pass runs."""

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if on_meta(model):
            give_memory(model, weights_of(model, self.weights), self.ranks.device)
        self.module = model.to(self.ranks.device)
        self._replicas: DistributedDataParallel | None = None
        if self.ranks.size > 1:
            self._replicas = DistributedDataParallel(Methods(model), forward_sync_buffers=False, gradient_as_bucket_view=True)

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, last: bool) -> Any:
        with autocast(self.settings.precision, self.ranks.device):
            if self._replicas is None:
                return getattr(self.module, method)(*args, **kwargs)
            # What DDP's no_sync() sets; a context manager would have to span forward and backward of the user's loop.
            self._replicas.require_backward_grad_sync = last
            return self._replicas(method, *args, **kwargs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        torch.autograd.backward(loss * self.ranks.data_size)  # DDP takes the mean over the ranks; the sum is wanted

    def update(self, optimizer: torch.optim.Optimizer, *, clip_norm: float) -> Tensor:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm
