"""A replica on every rank: PyTorch's DistributedDataParallel, or nothing around the model when there is one replica only."""

# (no "from __future__ import annotations": DDP reads those of its communication hook)
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainrun.config import ConfigError
from trainrun.models.weights import give_memory, on_meta, weights_of
from trainrun.precision import autocast
from trainrun.strategies.base import copy_from_first
from trainrun.strategies.mesh import mesh_of
from trainrun.strategies.methods import Methods
from trainrun.strategies.tensor_parallel import split
from trainrun.strategies.torch_base import TorchStrategy
from trainrun.words import counted


class DDP(TorchStrategy):
    """Replicas whose gradients are summed over the ranks while the backward pass runs; or one model that all ranks split."""

    def _spread(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        if on_meta(model):
            give_memory(model, weights_of(model, self.weights), self.ranks.device)
        model.to(self.ranks.device)
        self._replicas: DistributedDataParallel | None = None
        if self.ranks.tensor_parallel > 1:
            self._split(model)
        elif self.ranks.size > 1:
            self._replicas = DistributedDataParallel(_LastFirst(model), forward_sync_buffers=False, gradient_as_bucket_view=True)
            _settle_buckets(self._replicas)
            self._replicas.register_comm_hook(None, _sum)

    def _split(self, model: nn.Module) -> None:
        if self.ranks.data_size > 1:
            raise ConfigError(
                [
                    f'strategy is "ddp" with sharding.tensor_parallel {self.ranks.tensor_parallel} on {self.ranks.size} ranks: '
                    "there are no replicas of a model that is split. Allowed: tensor_parallel 1 or "
                    f'{self.ranks.size}, or strategy "fsdp2".'
                ]
            )
        copy_from_first(model)
        self.mesh = mesh_of(self.ranks, shard_size=1)
        split(model, self.mesh["tensor"])

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, last: bool) -> Any:
        with autocast(self.settings.precision, self.ranks.device):
            if self._replicas is None:
                return getattr(self.module, method)(*args, **kwargs)
            # What DDP's no_sync() sets; a context manager would have to span forward and backward of the user's loop.
            self._replicas.require_backward_grad_sync = last
            return self._replicas(method, *args, **kwargs)

    def update(self, optimizer: torch.optim.Optimizer, *, clip_norm: float) -> Tensor:
        if self._replicas is not None:
            self._require_gradients()
        return super().update(optimizer, clip_norm=clip_norm)

    def _require_gradients(self) -> None:
        """Those that share a bucket with a parameter without one were not summed over the ranks."""
        idle = [name for name, p in self.module.named_parameters() if p.requires_grad and p.grad is None]
        if idle:
            raise RuntimeError(
                f"{counted(len(idle), 'parameter')} that should train got no gradient in this step: {', '.join(idle[:3])}. With "
                'several ranks strategy "ddp" sums gradients only when all are there. Let the loss depend on each, if only by '
                "adding 0 times its sum; or freeze what is not used by requires_grad_(False) before run.prepare()."
            )

    def rehearse(self, batch: Any) -> None:
        # never the last: gradients that are forgotten need not be summed
        self.backward(self.call("loss", (batch,), {}, last=False), last=False)


class _LastFirst(Methods):
    """Has the model's parameters from the last to the first, about as their gradients come."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for number, parameter in enumerate(reversed(list(model.parameters()))):
            self.register_parameter(f"parameter_{number}", parameter)


def _settle_buckets(replicas: DistributedDataParallel) -> None:
    """Lay out the buckets of gradients once, in the order of the parameters.

    DDP by itself lays them out anew after its first step, as gradients came. With more than two ranks the order of a sum
    depends on the place in the bucket: the first step after a restart would not be, bit for bit, that of a run that went on.
    """
    replicas.reducer._push_all_rebuilt_params()
    rebuilt = replicas.reducer._rebuild_buckets()
    assert rebuilt, "DDP would lay out its buckets after the first step"


def _sum(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """DDP would take the mean, which wants a loss multiplied by the ranks: in fp16 it overflows the sooner the more there are."""
    reduced: torch.futures.Future[Any] = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return reduced.then(lambda future: future.value()[0])
