"""From single parts to shards, one in memory at a time."""

from __future__ import annotations

import hashlib

import torch

from trainrun.checkpoint.layout import Entry, Shard, shard_key
from trainrun.checkpoint.parts import Part
from trainrun.checkpoint.write import ALIGNMENT, shard_of
from trainrun.store import Store


class ShardWriter:
    """Puts one part behind the other into a block of memory, and each full block into the store.

    For a single process that has all of a checkpoint in its hands, one part after the other.

    Args:
        target: the run's folder.
        step: of the checkpoint.
        attempt: see `trainrun.checkpoint.layout.new_attempt`.
        size: bytes after which another shard is begun; about the most memory that this takes.

    Attributes:
        shards: that are written.
    """

    def __init__(self, target: Store, step: int, attempt: str, *, size: int) -> None:
        self.shards: list[Shard] = []
        self._target, self._step, self._attempt = target, step, attempt
        self._block = torch.empty(size, dtype=torch.uint8)  # takes memory as it is filled
        self._size = 0
        self._tensors: dict[str, tuple[Entry, ...]] = {}

    def add(self, part: Part) -> None:
        """Copy a part: its memory is its source's only until the next one comes."""
        length = part.local.nbytes
        if self._size and self._size + ALIGNMENT + length > len(self._block):
            self.end()
        if length > len(self._block):
            self._block = torch.empty(length, dtype=torch.uint8)
        start = -(-self._size // ALIGNMENT) * ALIGNMENT
        self._block[self._size : start] = 0
        self._size = start + length
        place = self._block[start : self._size]
        place.view(part.local.dtype).view(part.local.shape).copy_(part.local)
        entry = Entry(
            offset=start,
            length=length,
            dtype=str(part.local.dtype).removeprefix("torch."),
            shape=part.shape,
            slice=part.box,
            sha256=hashlib.sha256(place.numpy().data).hexdigest(),
        )
        self._tensors[part.name] = (*self._tensors.get(part.name, ()), entry)

    def end(self) -> None:
        """Write what there is."""
        if not self._tensors:
            return
        data = self._block[: self._size].numpy().data
        key = shard_key(self._step, self._attempt, len(self.shards))
        self._target.put(key, data)
        self.shards.append(shard_of(key, self._size, self._tensors, {}))
        self._size, self._tensors = 0, {}

    def remove(self) -> None:
        """Delete what was written: nothing will commit it."""
        self._target.delete([shard.key for shard in self.shards])
