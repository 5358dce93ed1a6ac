"""From tensors to a shard in the store, and from all shards to a commit."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainrun.checkpoint.layout import Commit, Entry, Shard, commit_key, shard_key
from trainrun.checkpoint.parts import Part
from trainrun.checkpoint.tensors import Values
from trainrun.store import Store

ALIGNMENT = 64
"""Bytes to which tensors are aligned in a shard, so that a mapped shard can be used in place."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of tensors as they were at one step: training may go on while it is written."""

    data: memoryview
    tensors: dict[str, tuple[Entry, ...]]
    values: Values


def take_snapshot(parts: Sequence[Part], values: Values) -> Snapshot:
    """Copy ``parts``, from whatever device, into one block of memory."""
    offsets = []
    size = 0
    for part in parts:
        size = -(-size // ALIGNMENT) * ALIGNMENT
        offsets.append(size)
        size += part.local.nbytes
    block = torch.zeros(size, dtype=torch.uint8)
    data = block.numpy().data
    tensors: dict[str, tuple[Entry, ...]] = {}
    for part, offset in zip(parts, offsets, strict=True):
        end = offset + part.local.nbytes
        block[offset:end].view(part.local.dtype).view(part.local.shape).copy_(part.local)
        entry = Entry(
            offset=offset,
            length=part.local.nbytes,
            dtype=str(part.local.dtype).removeprefix("torch."),
            shape=part.shape,
            slice=part.box,
            sha256=hashlib.sha256(data[offset:end]).hexdigest(),
        )
        tensors[part.name] = (*tensors.get(part.name, ()), entry)
    return Snapshot(data, tensors, values)


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
