"""The norm of a whole gradient of which each rank has some."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

SMALL = 1e-6
"""Added to the norm that is divided by, as `torch.nn.utils.clip_grad_norm_` does."""


def gradient_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The 2-norm of all ``gradients`` together, as if none were sharded; the same on all ranks.

    Plain tensors are taken to be whole and the same everywhere. DTensors may lie on several meshes: what several ranks have
    counts once. However they lie, ranks sum one number.

    Args:
        device: where the norm is put, and summed over the ranks.
    """
    by_copies: dict[int, list[Tensor]] = defaultdict(list)
    world = dist.get_world_size() if dist.is_initialized() else 1
    for gradient in gradients:
        by_copies[world // _shards(gradient)].append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    norms = {copies: nn.utils.get_total_norm(local).to(device) for copies, local in by_copies.items()}
    if by_copies.keys() <= {world}:  # nothing is sharded
        return norms.get(world, torch.zeros((), device=device))
    squared = torch.stack([norm.square() / copies for copies, norm in norms.items()]).sum()
    dist.all_reduce(squared)
    return squared.sqrt()


def _shards(gradient: Tensor) -> int:
    """Into how many parts it is divided among the ranks."""
    if not isinstance(gradient, DTensor):
        return 1
    assert not any(placement.is_partial() for placement in gradient.placements)
    sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


def multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all gradients by a scalar, in place."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        by_device[local.device].append(local)
    for device, here in by_device.items():
        torch._foreach_mul_(here, factor.to(device))
