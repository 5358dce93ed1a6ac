"""One digest for a model's weights, however they are spread over ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainrun.checkpoint.parts import Box, Part
from trainrun.checkpoint.tensors import DTYPES, model_tensors
from trainrun.config import from_mapping, to_mapping
from trainrun.ranks import Ranks


def model_digest(model: nn.Module) -> str:
    """sha256 over a whole model's tensors by name, bit for bit: equal for a model in memory and its restored checkpoint."""
    return tensors_digest(sorted(model_tensors(model).items()))


def tensors_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 over names, types, shapes and bytes, in the order given."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor.detach().cpu()).numpy().data)
    return digest.hexdigest()


def gathered(parts: list[Part], ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors by name, one after the other, in rank 0's main memory. Collective: all ranks use up the iterator.

    Args:
        parts: of this rank. Together the ranks have all of each tensor.
        ranks: all of them; only rank 0 is given anything.
    """
    mine: dict[str, list[Part]] = {}
    for part in parts:
        if part.copy == 0:
            mine.setdefault(part.name, []).append(part)
    plans = ranks.gather([to_mapping(_Held.of(part)) for own in mine.values() for part in own])
    holders: dict[str, list[tuple[int, _Held]]] = {}
    for rank, plan in enumerate(plans):
        for mapping in plan:
            holders.setdefault(mapping["name"], []).append((rank, from_mapping(_Held, mapping)))
    for name in sorted(holders):
        own = [part.local.cpu() for part in mine.get(name, [])]
        if ranks.first:
            yield name, _assemble(holders[name], own, ranks)
        else:
            for local in own:
                dist.send(_bytes(local), dst=0, group=ranks.storage)


@dataclass(frozen=True)
class _Held:
    """What rank 0 must know of a part that another rank has."""

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: str

    @classmethod
    def of(cls, part: Part) -> _Held:
        return cls(part.name, part.shape, part.box, str(part.local.dtype).removeprefix("torch."))


def _assemble(holders: list[tuple[int, _Held]], own: list[Tensor], ranks: Ranks) -> Tensor:
    """On rank 0: a whole tensor of its own parts, which come first, and of those that the others send."""
    first = holders[0][1]
    tensor = torch.empty(first.shape, dtype=DTYPES[first.dtype])
    mine = iter(own)
    for rank, held in holders:
        place = tensor[tuple(slice(start, stop) for start, stop in held.box)]
        if rank == 0:
            place.copy_(next(mine))
        else:
            local = torch.empty(place.shape, dtype=tensor.dtype)
            dist.recv(_bytes(local), src=rank, group=ranks.storage)
            place.copy_(local)
    return tensor


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor on the CPU; they share its memory when it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
