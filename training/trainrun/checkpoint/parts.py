"""The state of a run in parts: what of each tensor lies on this rank, and who else has it.

A strategy says which parts it has (`trainrun.strategies.base.Strategy.model_parts`). From there on a checkpoint knows
nothing of strategies: parts are boxes of elements, written by one set of ranks and put together again by any other.
Nothing here imports torch, for who only reckons with boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_PIECE = 32 * 1024**2
"""Bytes above which a part is written in pieces: a reader that needs some of a tensor reads, and checks, little more."""

SMALL = 256 * 1024
"""Bytes below which pieces (norms, step counters) lie together at the front of a shard, to be read in a few requests."""

Box = tuple[tuple[int, int], ...]
"""Start and stop in each dimension of a whole tensor."""


@dataclass(frozen=True, eq=False)
class Part:
    """A box of elements of one tensor, on this rank. There may be several of a tensor, and none."""

    name: str
    """``model/<canonical parameter or buffer>`` or ``optimizer/<canonical parameter>/<key>``."""
    local: Tensor
    """Shares memory with what trains: read it to save, write to it to restore."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: tuple[int, ...]
    """Where ``local`` lies in the whole; its own shape is its extent."""
    copies: int = 1
    """How many ranks hold exactly this part ..."""
    copy: int = 0
    """... and which of them this one is."""

    @property
    def box(self) -> Box:
        """Where ``local`` lies in the whole."""
        return tuple((start, start + size) for start, size in zip(self.start, self.local.shape, strict=True))


def whole(name: str, tensor: Tensor, *, copies: int = 1, copy: int = 0) -> Part:
    """A plain tensor as one part."""
    return Part(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), copies, copy)


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes of the same tensor share; None when that is nothing."""
    shared = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Indices of ``box`` in the tensor that holds ``outer``."""
    return tuple(slice(p[0] - q[0], p[1] - q[0]) for p, q in zip(box, outer, strict=True))


def to_write(parts: Iterable[Part]) -> list[Part]:
    """Which pieces of its parts this rank writes, so that each element is written once and all ranks write alike.

    Needs no communication: those who hold the same part hold all others that have as many copies too, sort them alike,
    and give the largest piece that is left to the one of them that has the least.
    """
    pieces = [piece for part in parts for piece in _pieces(part)]
    mine = []
    loads: dict[int, list[int]] = {}
    for piece in sorted(pieces, key=lambda piece: (-piece.local.nbytes, piece.name, piece.start)):
        load = loads.setdefault(piece.copies, [0] * piece.copies)
        writer = load.index(min(load))
        load[writer] += piece.local.nbytes
        if writer == piece.copy:
            mine.append(piece)
    return sorted(mine, key=lambda piece: (piece.local.nbytes >= SMALL, piece.name, piece.start))


def _pieces(part: Part) -> Iterator[Part]:
    """A part cut into boxes of at most `LARGEST_PIECE` bytes; nothing of a part without elements, unless the whole has none."""
    if not part.local.numel() and 0 not in part.shape:
        return
    if part.local.nbytes <= LARGEST_PIECE:
        yield part
        return
    dimension = next(d for d, size in enumerate(part.local.shape) if size > 1)
    size = part.local.shape[dimension]
    step = max(1, size * LARGEST_PIECE // part.local.nbytes)
    for first in range(0, size, step):
        start = tuple(s + first if d == dimension else s for d, s in enumerate(part.start))
        local = part.local.narrow(dimension, first, min(step, size - first))
        yield from _pieces(replace(part, local=local, start=start))


def cover(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes make up a whole of ``shape``: as many elements as it has, and none twice."""
    filled = [box for box in boxes if all(start < stop for start, stop in box)]
    elements = sum(math.prod(stop - start for start, stop in box) for box in filled)
    return elements == math.prod(shape) and _disjoint(filled)


def _disjoint(boxes: list[Box]) -> bool:
    """Whether no two boxes share an element; fast for boxes that straight cuts through the whole separate, as shards are."""
    if len(boxes) < 2:
        return True
    for dimension in range(len(boxes[0])):
        groups = _separated(boxes, dimension)
        if len(groups) > 1:
            return all(_disjoint(group) for group in groups)
    return not any(intersection(a, b) is not None for i, a in enumerate(boxes) for b in boxes[:i])


def _separated(boxes: list[Box], dimension: int) -> list[list[Box]]:
    """Groups of boxes between which a straight cut across ``dimension`` goes."""
    groups: list[list[Box]] = []
    end = 0
    for box in sorted(boxes, key=lambda box: box[dimension]):
        if not groups or box[dimension][0] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box[dimension][1])
    return groups
