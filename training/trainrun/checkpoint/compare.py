"""What differs between two checkpoints. Tensors are read piece by piece, and not at all where their digests are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trainrun.checkpoint.layout import Commit, Entry
from trainrun.checkpoint.parts import Part, to_write, whole
from trainrun.checkpoint.read import kinds, load_into
from trainrun.store import Store

AT_ONCE = 128 * 1024**2
"""About how many bytes of each of both are in memory."""


@dataclass(frozen=True)
class Side:
    """One of the two."""

    store: Store
    commit: Commit


@dataclass
class Differences:
    """Between two checkpoints, called A and B."""

    only_a: list[str] = field(default_factory=list)
    """Tensors by name."""
    only_b: list[str] = field(default_factory=list)
    kinds: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Tensors of another type or shape, as in A and in B."""
    equal: int = 0
    """Tensors that are the same bit for bit."""
    different: dict[str, float] = field(default_factory=dict)
    """The largest absolute difference of all others. 0 where only bits differ (-0.0 and 0.0), nan where one has a nan."""
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """By dotted name; None where one has none of it."""
    others: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Of what the COMMITs tell beside: step, tokens, world, position in the data, versions, values."""

    def __bool__(self) -> bool:
        return bool(self.only_a or self.only_b or self.kinds or self.different or self.settings or self.others)


def compare(a: Side, b: Side, *, done: Callable[[int], None] = lambda count: None) -> Differences:
    """What differs.

    Args:
        done: told of each number of bytes of A that are compared, whether or not they had to be read.

    Raises:
        Damaged: one of the two is not what was written.
    """
    in_a, in_b = kinds(a.commit), kinds(b.commit)
    found = Differences(only_a=sorted(in_a.keys() - in_b.keys()), only_b=sorted(in_b.keys() - in_a.keys()))
    found.settings = _differing(_flat(a.commit.settings), _flat(b.commit.settings))
    found.others = _differing(_told(a.commit), _told(b.commit))
    contents = _contents(a.commit), _contents(b.commit)
    to_read: dict[str, Tensor] = {}
    for name in sorted(in_a.keys() & in_b.keys()):
        one, other = in_a[name], in_b[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            found.kinds[name] = _kind(one), _kind(other)
        elif contents[0][name] == contents[1][name]:
            found.equal += 1
        else:
            to_read[name] = one
            continue
        done(one.nbytes)
    for pieces in _portions(to_read):
        mine, theirs = _read(a, pieces), _read(b, pieces)
        for x, y in zip(mine, theirs, strict=True):
            largest = largest_difference(x.local, y.local)
            if largest is not None:
                found.different[x.name] = _larger(found.different.get(x.name, 0.0), largest)
            done(x.local.nbytes)
    found.equal += len(to_read.keys() - found.different.keys())
    return found


def largest_difference(a: Tensor, b: Tensor) -> float | None:
    """The largest absolute difference of two tensors of the same type and shape; None when they are the same bit for bit."""
    a, b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    if torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return None
    if not (a.is_complex() or a.dtype == torch.float64):
        wide = torch.float32 if a.is_floating_point() else torch.float64
        a, b = a.to(wide), b.to(wide)
    largest = float((a - b).abs().max())
    if largest == largest:
        return largest
    # of nan and infinities, only those that are not the same on both sides count
    same = (a.view(torch.uint8) == b.view(torch.uint8)).view(-1, a.itemsize).all(dim=1)
    return float((a[~same] - b[~same]).abs().max())


def _larger(a: float, b: float) -> float:
    return a if a != a or a > b else b  # nan is larger than all


def _portions(wanted: Mapping[str, Tensor]) -> Iterator[list[Part]]:
    """Pieces of the tensors, still without memory, as many at a time as are read together."""
    portion: list[Part] = []
    size = 0
    for name, kind in wanted.items():
        for piece in to_write([whole(name, kind)]):
            if portion and size + piece.local.nbytes > AT_ONCE:
                yield portion
                portion, size = [], 0
            portion.append(piece)
            size += piece.local.nbytes
    if portion:
        yield portion


def _read(side: Side, pieces: list[Part]) -> list[Part]:
    targets = [replace(piece, local=torch.empty_like(piece.local, device="cpu")) for piece in pieces]
    load_into(targets, side.store, side.commit)
    return targets


def _contents(commit: Commit) -> dict[str, list[tuple[Any, str]]]:
    """Of each tensor, its slices and their digests: what is the same has the same bytes, if it is what was written."""
    entries: dict[str, list[Entry]] = {}
    for shard in commit.shards:
        for name, own in shard.tensors.items():
            entries.setdefault(name, []).extend(own)
    return {name: sorted((entry.slice, entry.sha256) for entry in own) for name, own in entries.items()}


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _told(commit: Commit) -> dict[str, Any]:
    told: dict[str, Any] = {"step": commit.step, "tokens": commit.tokens, "world": commit.world, "metric": commit.metric}
    for name in ("mesh", "data", "versions"):
        told |= _flat(getattr(commit, name), f"{name}.")
    return told | {f"value {name}": value for name, value in commit.values().items()}


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in mapping.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (a.get(name), b.get(name)) for name in sorted({*a, *b}) if a.get(name) != b.get(name)}
