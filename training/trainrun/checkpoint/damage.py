"""Every tensor of a checkpoint read and held against its digest: which of them are not what was written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Lock

from trainrun.checkpoint.layout import Commit, Entry, Shard
from trainrun.store import Range, Store

AT_ONCE = 256 * 1024**2
"""Bytes that are read before the memory is used again; a slice that is larger is read alone."""


@dataclass
class Damage:
    """What is wrong with a checkpoint."""

    problems: list[str] = field(default_factory=list)
    """Sentences on objects."""
    tensors: dict[str, list[str]] = field(default_factory=dict)
    """By the name of each damaged tensor, the objects in which it is."""
    read: int = 0
    """Bytes that were read and checked."""

    def __bool__(self) -> bool:
        return bool(self.problems or self.tensors)

    def add(self, name: str, key: str) -> None:
        """A slice of a tensor is damaged."""
        keys = self.tensors.setdefault(name, [])
        if key not in keys:
            keys.append(key)


def find_damage(store: Store, commit: Commit, *, done: Callable[[int], None] = lambda count: None) -> Damage:
    """Read all that a commit names, in parallel, and check it.

    Args:
        done: told of each number of bytes that was checked, from several threads.

    Raises:
        StoreError: something could not be read, which says nothing of the checkpoint.
    """
    damage, lock = Damage(), Lock()
    sizes = {item.key: item.size for item in store.list(f"{commit.shards[0].key.rpartition('/')[0]}/")}
    memory = memoryview(bytearray(0))
    for portion in _portions(_readable(store, commit, sizes, damage)):
        size = sum(entry.length for _, _, entry in portion)
        if len(memory) < size:
            memory = memoryview(bytearray(max(size, min(AT_ONCE, commit.bytes))))
        wanted: dict[int, tuple[Shard, str, Entry]] = {}
        ranges = []
        start = 0
        for shard, name, entry in portion:
            ranges.append(Range(shard.key, entry.offset, memory[start : start + entry.length]))
            wanted[id(ranges[-1])] = shard, name, entry
            start += entry.length

        def check(item: Range, wanted: dict[int, tuple[Shard, str, Entry]] = wanted) -> None:
            shard, name, entry = wanted[id(item)]
            good = hashlib.sha256(item.into).hexdigest() == entry.sha256
            with lock:
                damage.read += entry.length
                if not good:
                    damage.add(name, shard.key)
            done(entry.length)

        store.read_into(ranges, done=check)
    return damage


def _readable(store: Store, commit: Commit, sizes: dict[str, int], damage: Damage) -> Iterator[tuple[Shard, str, Entry]]:
    """All slices that are there; of those that are not, ``damage`` is told."""
    for shard in commit.shards:
        size = sizes.get(shard.key, -1)
        if size < 0:
            damage.problems.append(f"{store.locate(shard.key)} is missing")
        elif size != shard.length:
            damage.problems.append(f"{store.locate(shard.key)} has {size} bytes instead of {shard.length}")
        slices = [(name, entry) for name, entries in shard.tensors.items() for entry in entries]
        for name, entry in sorted(slices, key=lambda item: item[1].offset):
            if entry.offset + entry.length > size:
                damage.add(name, shard.key)
            else:
                yield shard, name, entry


def _portions(slices: Iterator[tuple[Shard, str, Entry]]) -> Iterator[list[tuple[Shard, str, Entry]]]:
    portion: list[tuple[Shard, str, Entry]] = []
    size = 0
    for item in slices:
        if portion and size + item[2].length > AT_ONCE:
            yield portion
            portion, size = [], 0
        portion.append(item)
        size += item[2].length
    if portion:
        yield portion
