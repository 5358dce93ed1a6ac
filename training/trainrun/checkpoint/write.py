"""From bytes in memory to a shard in the store, and from all shards to a commit. No torch: a process without it does this."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from trainrun.checkpoint.layout import (
    Commit,
    Damaged,
    Entry,
    Shard,
    commit_key,
    contradiction,
    digest_of,
    parse_shard,
    shard_key,
)
from trainrun.checkpoint.parts import Box, Part
from trainrun.parallel import in_threads
from trainrun.store import READ_THREADS, Progress, Store, StoreError, check_deadline

ALIGNMENT = 64
"""Bytes to which tensors are aligned in a shard, so that a mapped shard can be used in place."""

BLOCK = 16 * 1024**2
"""Bytes that are hashed between two looks at the deadline."""

Values = Mapping[str, Any]


class Slot(NamedTuple):
    """Where a slice of a tensor lies in a shard."""

    name: str
    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True)
class Plan:
    """Where everything lies in a shard, in the order of its bytes."""

    slots: tuple[Slot, ...]
    size: int
    """Bytes of the shard."""

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Plan:
        """Parts one behind the other, in the order given."""
        slots = []
        size = 0
        for part in parts:
            offset = -(-size // ALIGNMENT) * ALIGNMENT
            size = offset + part.local.nbytes
            dtype = str(part.local.dtype).removeprefix("torch.")
            slots.append(Slot(part.name, offset, part.local.nbytes, dtype, part.shape, part.box))
        return cls(tuple(slots), size)

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[Any]], size: int) -> Plan:
        """Of its slots as JSON has them."""
        return cls(
            tuple(
                Slot(name, offset, length, dtype, tuple(shape), tuple((start, stop) for start, stop in box))
                for name, offset, length, dtype, shape, box in rows
            ),
            size,
        )


@dataclass(frozen=True)
class Snapshot:
    """Tensors as they were at one step: training may go on while they are written."""

    data: memoryview
    plan: Plan
    values: Values


def write_shard(
    store: Store,
    snapshot: Snapshot,
    *,
    step: int,
    attempt: str,
    rank: int,
    timeout_seconds: float,
    progress: Progress | None = None,
) -> Shard:
    """Write a snapshot as one rank's shard, and then beside it the description of what is in it.

    Raises:
        StoreError: it is not there after ``timeout_seconds``, or for another reason.
    """
    key = shard_key(step, attempt, rank)
    deadline = time.monotonic() + timeout_seconds
    with ThreadPoolExecutor(1) as beside:
        digests = beside.submit(_digests, snapshot, deadline)
        store.put(key, snapshot.data, deadline=deadline, progress=progress)
        try:
            entries = _entries(snapshot.plan, digests.result())
        except TimeoutError as error:
            raise StoreError(f"Could not make the digests of {store.locate(key)}: {error}.") from None
    shard = shard_of(key, len(snapshot.data), entries, snapshot.values)
    store.put(_description_key(key), shard.to_json().encode(), deadline=deadline)
    return shard


def shard_of(key: str, length: int, tensors: Mapping[str, tuple[Entry, ...]], values: Values) -> Shard:
    """A shard with the digest of its slices."""
    digest = digest_of(entry for entries in tensors.values() for entry in entries)
    return Shard(key=key, length=length, sha256=digest, tensors=dict(tensors), values=dict(values))


def commit_shards(store: Store, header: Mapping[str, Any], *, timeout_seconds: float) -> tuple[Commit, bool]:
    """Make a checkpoint of the shards that all ranks have written.

    Args:
        store: the run's folder.
        header: the fields of `Commit` but for ``shards``.
        timeout_seconds: after which no more is tried.

    Returns:
        The commit, and False when another attempt at the same step was committed first: that one stays.

    Raises:
        StoreError: not written, or what the ranks wrote makes no checkpoint.
    """
    deadline = time.monotonic() + timeout_seconds
    step, attempt, world = header["step"], header["attempt"], header["world"]
    shards: dict[int, Shard] = {}

    def read(rank: int) -> None:
        shards[rank] = _read_description(store, _description_key(shard_key(step, attempt, rank)))

    in_threads([partial(read, rank) for rank in range(world)], READ_THREADS)
    commit = Commit(**header, shards=tuple(shards[rank] for rank in range(world)))
    problem = contradiction(commit, step)
    if problem:
        raise StoreError(f"what the ranks wrote is no checkpoint: {problem}")
    return commit, write_commit(store, commit, deadline=deadline)


def write_commit(store: Store, commit: Commit, *, deadline: float | None = None) -> bool:
    """Make the checkpoint exist. False when another attempt at the same step did so first: that one stays.

    Raises:
        StoreError: not written.
    """
    key = commit_key(commit.step)
    document = commit.to_json().encode()
    if store.put_new(key, document, deadline=deadline):
        return True
    # A repeated request whose first answer was lost finds its own commit.
    return store.get(key) == document


def _description_key(key: str) -> str:
    """Where the description of a shard lies."""
    return key.removesuffix(".bin") + ".json"


def _read_description(store: Store, key: str) -> Shard:
    try:
        shard = parse_shard(store.get(key).decode(errors="replace"), key)
    except Damaged as error:
        raise StoreError(f"{store.locate(key)} is not what was written: {error}") from None
    if shard.sha256 != digest_of(entry for entries in shard.tensors.values() for entry in entries):
        raise StoreError(f"{store.locate(key)} is not what was written (sha256 differs)")
    return shard


def _entries(plan: Plan, digests: Sequence[str]) -> dict[str, tuple[Entry, ...]]:
    tensors: dict[str, tuple[Entry, ...]] = {}
    for slot, digest in zip(plan.slots, digests, strict=True):
        entry = Entry(offset=slot.offset, length=slot.length, dtype=slot.dtype, shape=slot.shape, slice=slot.box, sha256=digest)
        tensors[slot.name] = (*tensors.get(slot.name, ()), entry)
    return tensors


def _digests(snapshot: Snapshot, deadline: float) -> list[str]:
    """sha256 of each slot."""
    each = []
    for slot in snapshot.plan.slots:
        digest = hashlib.sha256()
        for start in range(slot.offset, slot.offset + slot.length, BLOCK):
            check_deadline(deadline)
            digest.update(snapshot.data[start : min(start + BLOCK, slot.offset + slot.length)])
        each.append(digest.hexdigest())
    return each
