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
from trainrun.config import ConfigError
from trainrun.ranks import Ranks
from trainrun.strategies.zero_nvme import WEIGHTS


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
    """fp32 master weights of everything that this rank has of the group (stage 3: of a part of the group), and the optimizer's
    key to their state."""
    offset: int
    """Where in it the stretch begins."""
    copies: dict[str, Tensor] | None = None
    """Copies of weights and state, when they themselves are on a disk."""

    @property
    def weights(self) -> Tensor:
        """The master weights of the stretch."""
        return self.within(self.flat if self.copies is None else self.copies[WEIGHTS])

    def within(self, state: Tensor) -> Tensor:
        """The stretch in a tensor that is as long as `flat`."""
        return state.detach().narrow(0, self.offset, self.stretch.elements)

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state of `flat`."""
        on_disk = {} if self.copies is None else {key: value for key, value in self.copies.items() if key != WEIGHTS}
        return {**optimizer.state.get(self.flat, {}), **on_disk}


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


Copies = dict[int, dict[str, Tensor]]
"""As `trainrun.strategies.zero_nvme.DiskCopies.read`."""


def trained(zero: Any, module: nn.Module, copies: Copies) -> list[Trained]:
    """The parameters that train, each with the stretch of it that this rank updates.

    Args:
        zero: the optimizer of DeepSpeed's engine.
        module: the user's model.
        copies: of what is on a disk.
    """
    names = {parameter: canonical(name) for name, parameter in module.named_parameters()}
    return list(_stage_3(zero, names, copies) if is_stage_3(zero) else _stage_1_and_2(zero, names))


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


def _stage_3(zero: Any, names: dict[nn.Parameter, str], copies: Copies) -> Iterator[Trained]:
    for number, (group, flat) in enumerate(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)):
        for parameter in group:
            _, offset, size = zero.grad_position[zero.get_param_id(parameter)]
            start = min(dist.get_rank() * size, parameter.ds_numel)
            elements = min(size, parameter.ds_numel - start)
            stretch = Stretch(names[parameter], tuple(parameter.ds_shape), start, elements)
            yield Trained(parameter, stretch, zero.sub_group_to_group_id[number], flat, offset, copies.get(number))


def optimizer_parts(everything: list[Trained], optimizer: torch.optim.Optimizer, ranks: Ranks) -> list[Part]:
    """The optimizer's state on this rank. What it has once for a whole group (a step counter) is told of each parameter."""
    parts = []
    for one in everything:
        for key, value in one.state(optimizer).items():
            name = f"optimizer/{one.stretch.name}/{key}"
            if isinstance(value, Tensor) and value.dim():
                parts += one.stretch.parts(name, one.within(value))
            elif isinstance(value, Tensor):
                parts.append(whole(name, value.detach(), copies=ranks.size, copy=ranks.rank))
    return parts


def require_tensors(optimizer: torch.optim.Optimizer) -> None:
    """Raise a ConfigError if the optimizer's state has something that is no tensor: checkpoints would be without it."""
    others = {key for state in optimizer.state.values() for key, value in state.items() if not isinstance(value, Tensor)}
    if others:
        raise ConfigError(
            [
                f"{type(optimizer).__name__} keeps state that is no tensor: {', '.join(sorted(others))}. ZeRO has state for "
                "stretches of parameters, and checkpoints of it have tensors alone. Make them tensors (a counter: "
                "torch.tensor(0.0)), or set strategy to ddp or fsdp2."
            ]
        )


def make_state(one: Trained, key: str, kind: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer have a piece of state of which ``kind`` is that of one parameter, for all of its group: zeros."""
    if key in one.state(optimizer):
        return
    if kind.dim():
        target = optimizer.state[one.flat] if one.copies is None else one.copies
        target[key] = torch.zeros_like(one.flat.detach() if one.copies is None else one.copies[WEIGHTS], dtype=kind.dtype)
        return
    # torch keeps a step counter on the CPU unless the update itself runs on the device
    group = optimizer.param_groups[one.group]
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    optimizer.state[one.flat][key] = torch.zeros((), dtype=kind.dtype, device=one.flat.device if on_device else "cpu")


@torch.no_grad()
def spread_masters(zero: Any) -> None:
    """Make the parameters that compute, on all ranks, what the master weights say, of those in memory. Collective."""
    if not is_stage_3(zero):
        zero.update_lp_params()
        return
    zero.checkpoint_event_prologue()  # lets go of what is gathered
    for number in range(len(zero.fp16_groups)):
        if not zero._swappable_optimizer_subgroup(number):
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
