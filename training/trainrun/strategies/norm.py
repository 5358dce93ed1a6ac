"""The norm of a whole gradient of which each rank has some."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

SMALL = 1e-6
"""Added to the norm that is divided by, as `torch.nn.utils.clip_grad_norm_` does."""


def gradient_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The 2-norm of all ``gradients`` together, as if none were sharded; the same on all ranks.

    Plain tensors are taken to be whole and the same everywhere. DTensors may lie on several meshes: what is sharded over a
    dimension of a mesh is summed over it, what is replicated is counted once.

    Args:
        device: where the norm is put, and summed over the ranks.
    """
    sharded: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            assert not any(placement.is_partial() for placement in gradient.placements)
            dimensions = tuple(d for d, placement in enumerate(gradient.placements) if isinstance(placement, Shard))
            sharded[gradient.device_mesh if dimensions else None, dimensions].append(gradient.to_local())
        else:
            sharded[None, ()].append(gradient)
    norms = []
    for (mesh, dimensions), local in sharded.items():
        norm = nn.utils.get_total_norm(local).to(device)
        if mesh is not None:
            squared = norm.square()
            for dimension in dimensions:
                dist.all_reduce(squared, group=mesh.get_group(dimension))
            norm = squared.sqrt()
        norms.append(norm)
    if len(norms) == 1:
        return norms[0]
    return torch.stack(norms).square().sum().sqrt() if norms else torch.zeros((), device=device)


def multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all gradients by a scalar, in place."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        by_device[local.device].append(local)
    for device, here in by_device.items():
        torch._foreach_mul_(here, factor.to(device))
