"""From a commit to tensors: each range that is read is checked by its length and its digest before it is used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from trainrun.checkpoint.layout import DTYPES, Commit, Damaged, Entry, Shard, committed_steps, read_commit
from trainrun.checkpoint.tensors import Named
from trainrun.errors import CheckpointError
from trainrun.store import Store, StoreKeyMissing

CHUNK = 64 * 1024**2
"""Most bytes that are read at once, single tensors that are larger excepted."""

T = TypeVar("T")


def load_into(targets: Named, store: Store, commit: Commit) -> None:
    """Overwrite each of ``targets`` with the commit's tensor of that name, put together from its slices.

    On a failure some targets have been overwritten and others not.

    Raises:
        Damaged: bytes are missing or are not those that were written, or slices do not cover a tensor.
        StoreError: the store could not be read.
    """
    pieces = commit.pieces()
    for name in targets:
        _check_cover(name, [entry for _, entry in pieces.get(name, [])])
    for shard in commit.shards:
        for name, entry, data in read_ranges(store, shard, [name for name in shard.tensors if name in targets]):
            piece = torch.frombuffer(data, dtype=DTYPES[entry.dtype]) if data else torch.empty(0, dtype=DTYPES[entry.dtype])
            place = targets[name][tuple(slice(start, stop) for start, stop in entry.slice)]
            place.copy_(piece.reshape(entry.extent))


def read_tensors(store: Store, commit: Commit, select: Callable[[str], bool]) -> Named:
    """The tensors whose names ``select`` picks, on the CPU; raises as `load_into`."""
    targets: Named = {}
    for name, pieces in commit.pieces().items():
        if select(name):
            entry = pieces[0][1]
            targets[name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    load_into(targets, store, commit)
    return targets


def read_ranges(store: Store, shard: Shard, names: list[str]) -> Iterator[tuple[str, Entry, bytearray]]:
    """The bytes of some of a shard's tensors, neighbours read together."""
    for group in _neighbours(shard, names):
        first, last = shard.tensors[group[0]], shard.tensors[group[-1]]
        data = _get(store, shard, first.offset, last.offset + last.length - first.offset)
        for name in group:
            entry = shard.tensors[name]
            start = entry.offset - first.offset
            part = data[start : start + entry.length]
            if hashlib.sha256(part).hexdigest() != entry.sha256:
                raise Damaged(f"{store.locate(shard.key)}: the bytes of {name} are not those that were written (sha256 differs)")
            yield name, entry, part


def verify(store: Store, commit: Commit) -> None:
    """Read all shards whole and check them.

    Raises:
        Damaged: one is not what was written.
        StoreError: one could not be read.
    """
    for shard in commit.shards:
        digest = hashlib.sha256()
        for start in range(0, shard.length, CHUNK):
            digest.update(_get(store, shard, start, min(CHUNK, shard.length - start)))
        if digest.hexdigest() != shard.sha256:
            raise Damaged(f"{store.locate(shard.key)} is not what was written (sha256 differs)")


def newest_good(store: Store, use: Callable[[Commit], T], *, warn: Callable[[str], None]) -> tuple[Commit, T]:
    """``use`` the newest commit for which it does not find damage, for a single process.

    Raises:
        CheckpointError: there is no commit, or none is good.
    """
    steps = committed_steps(store)
    if not steps:
        raise CheckpointError(f"There is no checkpoint at {store.url}.")
    for step in reversed(steps):
        try:
            commit = read_commit(store, step)
            return commit, use(commit)
        except (Damaged, StoreKeyMissing) as error:
            warn(f"The checkpoint of step {step} is damaged: {error}. Taking the one before it.")
    raise CheckpointError(f"All {len(steps)} checkpoints at {store.url} are damaged.")


def _get(store: Store, shard: Shard, start: int, length: int) -> bytearray:
    try:
        data = store.get(shard.key, start, length)
    except StoreKeyMissing as error:
        raise Damaged(str(error)) from None
    if len(data) != length:
        raise Damaged(f"{store.locate(shard.key)} ends after {start + len(data)} of {shard.length} bytes")
    return bytearray(data)


def _neighbours(shard: Shard, names: list[str]) -> Iterator[list[str]]:
    """Groups of tensors to be read in one go: in the order of the shard, with nothing unwanted of any size between them."""
    group: list[str] = []
    for name in sorted(names, key=lambda n: shard.tensors[n].offset):
        entry = shard.tensors[name]
        if group:
            first, last = shard.tensors[group[0]], shard.tensors[group[-1]]
            gap = entry.offset - (last.offset + last.length)
            if gap > 4096 or entry.offset + entry.length - first.offset > CHUNK:
                yield group
                group = []
        group.append(name)
    if group:
        yield group


def _check_cover(name: str, entries: list[Entry]) -> None:
    """Whether slices cover a tensor exactly: as many elements as it has, and no element twice."""
    if not entries:
        raise Damaged(f"the tensor {name} is missing")
    shape, dtype = entries[0].shape, entries[0].dtype
    whole = Tensor.numel(torch.empty(shape, device="meta"))
    same = all(entry.shape == shape and entry.dtype == dtype for entry in entries)
    covered = sum(entry.length for entry in entries) // DTYPES[dtype].itemsize
    overlap = any(_overlap(a, b) for i, a in enumerate(entries) for b in entries[:i])
    if not same or covered != whole or overlap:
        raise Damaged(f"the slices of the tensor {name} do not make up a whole of shape {shape}")


def _overlap(a: Entry, b: Entry) -> bool:
    return all(max(p[0], q[0]) < min(p[1], q[1]) for p, q in zip(a.slice, b.slice, strict=True))
