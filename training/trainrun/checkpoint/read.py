"""From a commit to tensors: each range that is read is checked by its length and its digest before it is used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from trainrun.checkpoint.layout import Commit, Damaged, Entry, Shard, committed_steps, read_commit
from trainrun.checkpoint.parts import Part, intersection, whole, within
from trainrun.checkpoint.tensors import DTYPES, Named
from trainrun.errors import CheckpointError
from trainrun.store import Store, StoreKeyMissing

CHUNK = 64 * 1024**2
"""Most bytes that are read at once, single slices that are larger excepted."""

GAP = 4096
"""Unwanted bytes between two wanted ones that are read with them rather than asked for around."""

T = TypeVar("T")


def kinds(commit: Commit) -> Named:
    """Shape and type of each tensor of a checkpoint, as a tensor on the meta device."""
    entries = {name: entries[0] for shard in commit.shards for name, entries in shard.tensors.items()}
    return {name: torch.empty(e.shape, dtype=DTYPES[e.dtype], device="meta") for name, e in entries.items()}


def load_into(targets: Iterable[Part], store: Store, commit: Commit) -> None:
    """Overwrite ``targets`` with what the commit has of their tensors, whoever wrote it in whatever slices.

    Only slices that hold something of a target are read, each once, whole, and checked. On a failure some targets have
    been overwritten and others not.

    Raises:
        Damaged: bytes are missing or are not those that were written, or a tensor is not there in this shape.
        StoreError: the store could not be read.
    """
    wanted: dict[str, list[Part]] = {}
    for part in targets:
        wanted.setdefault(part.name, []).append(part)
    there = kinds(commit)
    for name, parts in wanted.items():
        if name not in there or any(part.shape != there[name].shape for part in parts):
            raise Damaged(f"the tensor {name} of shape {list(parts[0].shape)} is missing")
    for shard in commit.shards:
        entries = [
            (name, entry)
            for name, entries in shard.tensors.items()
            for entry in entries
            if any(intersection(entry.slice, part.box) is not None for part in wanted.get(name, []))
        ]
        for name, entry, data in read_entries(store, shard, entries):
            for part in wanted[name]:
                _copy(entry, data, part)


def read_tensors(store: Store, commit: Commit, select: Callable[[str], bool]) -> Named:
    """The whole tensors whose names ``select`` picks, on the CPU; raises as `load_into`."""
    tensors = {name: torch.empty_like(kind, device="cpu") for name, kind in kinds(commit).items() if select(name)}
    load_into([whole(name, tensor) for name, tensor in tensors.items()], store, commit)
    return tensors


def read_entries(store: Store, shard: Shard, entries: list[tuple[str, Entry]]) -> Iterator[tuple[str, Entry, memoryview]]:
    """The bytes of some of a shard's slices, neighbours read together; raises as `load_into`."""
    for group in _neighbours(entries):
        start = group[0][1].offset
        data = _get(store, shard, start, group[-1][1].offset + group[-1][1].length - start)
        for name, entry in group:
            part = data[entry.offset - start :][: entry.length]
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


def _copy(entry: Entry, data: memoryview, part: Part) -> None:
    """Copy what a slice and a part share."""
    shared = intersection(entry.slice, part.box)
    if shared is not None:
        piece = torch.frombuffer(data, dtype=DTYPES[entry.dtype]).reshape(entry.extent)
        part.local[within(shared, part.box)].copy_(piece[within(shared, entry.slice)])


def _get(store: Store, shard: Shard, start: int, length: int) -> memoryview:
    try:
        data = store.get(shard.key, start, length)
    except StoreKeyMissing as error:
        raise Damaged(str(error)) from None
    if len(data) != length:
        raise Damaged(f"{store.locate(shard.key)} ends after {start + len(data)} of {shard.length} bytes")
    return memoryview(bytearray(data))  # writable, or torch warns of sharing it


def _neighbours(entries: list[tuple[str, Entry]]) -> Iterator[list[tuple[str, Entry]]]:
    """Groups of slices to be read in one go: in the order of the shard, with nothing unwanted of any size between them."""
    group: list[tuple[str, Entry]] = []
    for name, entry in sorted(entries, key=lambda item: item[1].offset):
        if group:
            first, last = group[0][1], group[-1][1]
            gap = entry.offset - (last.offset + last.length)
            if gap > GAP or entry.offset + entry.length - first.offset > CHUNK:
                yield group
                group = []
        group.append((name, entry))
    if group:
        yield group
