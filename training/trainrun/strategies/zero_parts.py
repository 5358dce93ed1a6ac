"""What DeepSpeed's ZeRO holds on one rank, in parts.

ZeRO flattens the parameters of a group one behind the other, and cuts the line among the ranks (stages 1 and 2), or cuts
each parameter and puts the pieces one behind the other (stage 3). Either way a rank has fp32 master weights of stretches of
flattened parameters, and the optimizer's state of the same stretches. A stretch of an N-dimensional tensor is a few boxes.

This leans on attributes of DeepSpeed's that are not its interface; a test holds them to the version that is pinned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainrun.checkpoint.parts import Part, whole
from trainrun.checkpoint.tensors import canonical
from trainrun.ranks import Ranks


@dataclass(frozen=True, eq=False)
class Stretch:
    """What one rank has of a parameter: some of its elements in a row, perhaps none."""

    name: str
    """The parameter's canonical name."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """The first of the elements here, of the flattened parameter."""
    elements: int
    """How many there are here."""

    def parts(self, name: str, local: Tensor) -> list[Part]:
        """A tensor of these elements as parts of the whole."""
        parts = []
        offset = 0
        for start, size in boxes(self.shape, self.start, self.start + self.elements):
            count = math.prod(size)
            parts.append(Part(name, local.detach().narrow(0, offset, count).view(size), self.shape, start))
            offset += count
        return parts


@dataclass(frozen=True, eq=False)
class Trained:
    """A parameter that trains, and where its master weights are on this rank."""

    parameter: nn.Parameter
    stretch: Stretch
    group: int
    """The optimizer's group."""
    flat: Tensor
    """fp32 master weights of everything that this rank has of the group (stage 3: of a part of the group)."""
    offset: int
    """Where in it the stretch begins."""

    def within(self, state: Tensor) -> Tensor:
        """The stretch in a tensor that is as long as `flat`."""
        return state.detach().narrow(0, self.offset, self.stretch.elements)


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Start and size of boxes that make up, in order, the elements ``start`` to ``stop`` of a flattened tensor of ``shape``."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # a stretch within one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    before = row * math.prod(shape[1:])
    for inner_start, inner_size in boxes(shape[1:], start - before, stop - before):
        yield (row, *inner_start), (1, *inner_size)


def own_share(tensor: Tensor, ranks: Ranks) -> tuple[int, Tensor]:
    """This rank's stretch of a tensor that is cut into equal ones, as stage 3 does: its first element, and its elements."""
    flat = tensor.detach().reshape(-1)
    size = -(-flat.numel() // ranks.size)
    start = min(ranks.rank * size, flat.numel())
    return start, flat[start : start + size]


def trained(zero: Any, module: nn.Module) -> list[Trained]:
    """The parameters that train, each with the stretch of it that this rank updates.

    Args:
        zero: the optimizer of DeepSpeed's engine.
        module: the user's model.
    """
    names = {parameter: canonical(name) for name, parameter in module.named_parameters()}
    return list(_stage_3(zero, names) if is_stage_3(zero) else _stage_1_and_2(zero, names))


def is_stage_3(zero: Any) -> bool:
    """Whether the optimizer of DeepSpeed's engine is that of stage 3."""
    return hasattr(zero, "fp16_groups")


def _stage_1_and_2(zero: Any, names: dict[nn.Parameter, str]) -> Iterator[Trained]:
    if hasattr(zero, "bit16_groups"):
        groups, lines, flats = zero.bit16_groups, zero.bit16_groups_flat, zero.single_partition_of_fp32_groups
    else:  # the optimizer that DeepSpeed has for stage 1 in bf16
        groups, lines, flats = zero.bf16_groups, zero.bf16_groups_flat, zero.fp32_groups_flat_partition
    for number, (group, line, flat) in enumerate(zip(groups, lines, flats, strict=True)):
        begin = dist.get_rank() * flat.numel()
        for parameter in group:  # a view of the line: where it begins there is where it begins in memory
            place = parameter.storage_offset() - line.storage_offset()
            start = min(max(begin - place, 0), parameter.numel())
            stop = max(start, min(begin + flat.numel() - place, parameter.numel()))
            stretch = Stretch(names[parameter], tuple(parameter.shape), start, stop - start)
            yield Trained(parameter, stretch, number, flat, max(place - begin, 0) if stop > start else 0)


def _stage_3(zero: Any, names: dict[nn.Parameter, str]) -> Iterator[Trained]:
    for number, (group, flat) in enumerate(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)):
        for parameter in group:
            _, offset, size = zero.grad_position[zero.get_param_id(parameter)]
            start = min(dist.get_rank() * size, parameter.ds_numel)
            elements = min(size, parameter.ds_numel - start)
            stretch = Stretch(names[parameter], tuple(parameter.ds_shape), start, elements)
            yield Trained(parameter, stretch, zero.sub_group_to_group_id[number], flat, offset)


def optimizer_parts(everything: list[Trained], state: dict[Tensor, dict[str, Any]], ranks: Ranks) -> list[Part]:
    """The optimizer's state on this rank. What it has once for a whole group (a step counter) is told of each parameter."""
    parts = []
    for one in everything:
        for key, value in state.get(one.flat, {}).items():
            name = f"optimizer/{one.stretch.name}/{key}"
            if not isinstance(value, Tensor):
                continue
            if _along(value, one.flat):
                parts += one.stretch.parts(name, one.within(value))
            else:
                parts.append(whole(name, value.detach(), copies=ranks.size, copy=ranks.rank))
    return parts


def empty_state(one: Trained, key: str, kind: Tensor, group: dict[str, Any]) -> Tensor:
    """A tensor for a piece of state of a whole group of which ``kind`` is one parameter's, zero where there is none."""
    if key != "step" and tuple(kind.shape) == one.stretch.shape:
        return torch.zeros_like(one.flat.detach(), dtype=kind.dtype)
    # torch keeps a step counter on the CPU unless the update itself runs on the device
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return torch.zeros(kind.shape, dtype=kind.dtype, device="cpu" if on_host else one.flat.device)


def _along(value: Tensor, flat: Tensor) -> bool:
    return value.dim() == 1 and value.shape == flat.shape


@torch.no_grad()
def spread_masters(zero: Any) -> None:
    """Make the low-precision parameters, on all ranks, what the master weights say. Collective."""
    if not is_stage_3(zero):
        zero.update_lp_params()
        return
    zero.checkpoint_event_prologue()  # lets go of what is gathered
    for number in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(number)
    zero.checkpoint_event_epilogue()  # gathers the small parameters, which it keeps


@torch.no_grad()
def spread_frozen(parameter: nn.Parameter, share: Tensor, ranks: Ranks) -> None:
    """Make a frozen parameter, on all ranks, what their shares of it say. Collective."""
    if hasattr(parameter, "ds_tensor"):
        parameter.ds_tensor[: share.numel()].copy_(share)
        return
    size = -(-parameter.numel() // ranks.size)
    mine = torch.zeros(size, dtype=parameter.dtype, device=parameter.device)
    mine[: share.numel()].copy_(share)
    everyone = [torch.empty_like(mine) for _ in range(ranks.size)]
    dist.all_gather(everyone, mine)
    parameter.copy_(torch.cat(everyone)[: parameter.numel()].view_as(parameter))
