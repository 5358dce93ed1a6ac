"""From tensors to a shard in the store, and from all shards to a commit."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

import torch

from trainrun.checkpoint.layout import Commit, Entry, Shard, commit_key, shard_key
from trainrun.checkpoint.tensors import Named, Values
from trainrun.store import Store

ALIGNMENT = 64
"""Bytes to which tensors are aligned in a shard, so that a mapped shard can be used in place."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of tensors as they were at one step: training may go on while it is written."""

    data: memoryview
    tensors: dict[str, Entry]
    values: Values


def take_snapshot(tensors: Named, values: Values) -> Snapshot:
    """Copy ``tensors``, from whatever device, into one block of memory."""
    offsets = {}
    size = 0
    for name, tensor in tensors.items():
        offsets[name] = size = -(-size // ALIGNMENT) * ALIGNMENT
        size += tensor.nbytes
    memory = bytearray(size)
    block, data = torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory)
    entries = {}
    for name, tensor in tensors.items():
        place = block[offsets[name] : offsets[name] + tensor.nbytes]
        place.view(tensor.dtype).copy_(tensor.reshape(-1))
        entries[name] = Entry(
            offset=offsets[name],
            length=tensor.nbytes,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            slice=tuple((0, size) for size in tensor.shape),
            sha256=hashlib.sha256(data[offsets[name] : offsets[name] + tensor.nbytes]).hexdigest(),
        )
    return Snapshot(data, entries, values)


def write_shard(store: Store, snapshot: Snapshot, *, step: int, attempt: str, rank: int, timeout_seconds: float) -> Shard:
    """Write a snapshot as one rank's shard.

    Raises:
        StoreError: it is not there after ``timeout_seconds``, or for another reason.
    """
    key = shard_key(step, attempt, rank)
    store.put(key, snapshot.data, deadline=time.monotonic() + timeout_seconds)
    return Shard(
        key=key,
        length=len(snapshot.data),
        sha256=hashlib.sha256(snapshot.data).hexdigest(),
        tensors=snapshot.tensors,
        values=snapshot.values,
    )


def write_commit(store: Store, commit: Commit) -> bool:
    """Make the checkpoint exist. False when another attempt at the same step did so first: that one stays.

    Raises:
        StoreError: not written.
    """
    key = commit_key(commit.step)
    document = commit.to_json().encode()
    if store.put_new(key, document):
        return True
    # A repeated request whose first answer was lost finds its own commit.
    return store.get(key) == document
