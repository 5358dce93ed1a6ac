"""A model made ready for a run: on its device, replicated, in its precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainrun.ranks import Ranks
from trainrun.settings import TrainSettings


class PreparedModel:
    """Stands for the user's model: calls go through the strategy and the precision, all else to the model itself.

    Args:
        model: on ``ranks.device`` already.
        last_micro_batch: whether the call belongs to the last micro-batch of a step, after which gradients are summed
            over the ranks; before it they only accumulate.
    """

    def __init__(self, model: nn.Module, *, settings: TrainSettings, ranks: Ranks, last_micro_batch: Callable[[], bool]) -> None:
        self.module = model
        self._precision, self._device = settings.precision, ranks.device
        self._last_micro_batch = last_micro_batch
        self._replicas: DistributedDataParallel | None = None
        if ranks.size > 1:
            self._replicas = DistributedDataParallel(_Methods(model), forward_sync_buffers=False, gradient_as_bucket_view=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self._call("__call__", *args, **kwargs)

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """The model's ``loss``: by contract the sum over the batch's valid tokens."""
        return self._call("loss", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self._autocast():
            if self._replicas is None:
                return getattr(self.module, method)(*args, **kwargs)
            # What DDP's no_sync() sets; a context manager would have to span forward and backward of the user's loop.
            self._replicas.require_backward_grad_sync = self._last_micro_batch()
            return self._replicas(method, *args, **kwargs)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._precision == "bf16":
            return torch.autocast(self._device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()


class _Methods(nn.Module):
    """Lets any method of a model run as the forward on which DDP hangs its work."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, method)(*args, **kwargs)
