"""From a commit to tensors: what is read is checked, slice by slice, by its length and its digest.

Slices go straight from the store into the memory of the tensor where they lie there in one piece, in main memory; no copy
is made of them. All others go through a buffer, as do small ones, which are read with their neighbours: a request costs more
than a copy. Whatever the size
of the model, the buffer has at most `AT_ONCE` bytes, or those of the largest slice (our own have 32 MiB at most).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from trainrun.checkpoint.layout import Commit, Damaged, Entry, committed_steps, read_commit, step_directory
from trainrun.checkpoint.parts import SMALL, Part, intersection, whole, within
from trainrun.checkpoint.tensors import DTYPES, Named
from trainrun.errors import CheckpointError
from trainrun.store import Range, Store, StoreKeyMissing, StoreObjectShort

AT_ONCE = 256 * 1024**2
"""Bytes that are read into the buffer before it is used again."""

TOGETHER = 8 * 1024**2
"""Most bytes of neighbouring slices that are read as one range."""

GAP = 4096
"""Unwanted bytes between two wanted slices that are read with them rather than asked for around."""

T = TypeVar("T")


class Gone(Damaged):
    """Bytes that a commit names are not there."""


def lacking(store: Store, commit: Commit) -> str | None:
    """What of the shards is not there, as a listing tells; None when all is.

    Raises:
        StoreError: it could not be listed.
    """
    sizes = {item.key: item.size for item in store.list(f"{step_directory(commit.step)}/{commit.attempt}/")}
    for shard in commit.shards:
        if shard.key not in sizes:
            return f"{store.locate(shard.key)} is gone"
        if sizes[shard.key] != shard.length:
            return f"{store.locate(shard.key)} has {sizes[shard.key]} bytes, not the {shard.length} that were written"
    return None


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
    straight: list[_Reading] = []
    buffered: list[_Reading] = []
    for shard in commit.shards:
        slices = []
        for name in wanted.keys() & shard.tensors.keys():
            for entry in shard.tensors[name]:
                parts = [part for part in wanted[name] if intersection(entry.slice, part.box) is not None]
                place = _place(entry, parts) if entry.length >= SMALL else None
                if place is not None:
                    straight.append(_Reading(shard.key, entry.offset, [_Slice(name, entry, ())], place))
                elif parts:
                    slices.append(_Slice(name, entry, tuple(parts)))
        buffered += _neighbours(shard.key, slices)
    _read(store, sorted(straight, key=lambda reading: (reading.key, reading.start)))
    for portion in _portions(buffered):
        _read(store, portion)


def read_tensors(store: Store, commit: Commit, select: Callable[[str], bool]) -> Named:
    """The whole tensors whose names ``select`` picks, on the CPU; raises as `load_into`."""
    tensors = {name: torch.empty_like(kind, device="cpu") for name, kind in kinds(commit).items() if select(name)}
    load_into([whole(name, tensor) for name, tensor in tensors.items()], store, commit)
    return tensors


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
            if problem := lacking(store, commit):
                raise Damaged(problem)
            return commit, use(commit)
        except (Damaged, StoreKeyMissing) as error:
            warn(f"The checkpoint of step {step} is damaged: {error}. Taking the one before it.")
    raise CheckpointError(f"All {len(steps)} checkpoints at {store.url} are damaged.")


@dataclass(frozen=True)
class _Slice:
    """What is wanted of a shard."""

    name: str
    entry: Entry
    parts: tuple[Part, ...]
    """That it is copied into; none when it is read into its place."""

    def use(self, data: memoryview, store: Store, key: str) -> None:
        """Check the bytes that were read, and put them where they are wanted."""
        entry = self.entry
        if not self._good(data):
            # A harmed answer is no harmed object: S3 has no checksum for a part of one. What is damaged stays so.
            store.read_into([Range(key, entry.offset, data)], threads=1)
        if not self._good(data):
            where = "" if entry.extent == entry.shape else f" {[f'{start}:{stop}' for start, stop in entry.slice]}"
            raise Damaged(
                f"{store.locate(key)}: the {entry.length} bytes of {self.name}{where} from byte {entry.offset} are not those "
                "that were written (sha256 differs)"
            )
        for part in self.parts:
            shared = intersection(entry.slice, part.box)
            assert shared is not None
            piece = torch.frombuffer(data, dtype=DTYPES[entry.dtype]).reshape(entry.extent)
            part.local[within(shared, part.box)].copy_(piece[within(shared, entry.slice)])

    def _good(self, data: memoryview) -> bool:
        return hashlib.sha256(data).hexdigest() == self.entry.sha256


@dataclass
class _Reading:
    """A range of a shard, and the slices in it."""

    key: str
    start: int
    slices: list[_Slice]
    into: memoryview | None = None
    """The place of its only slice; None when it goes through the buffer."""

    @property
    def stop(self) -> int:
        return self.slices[-1].entry.offset + self.slices[-1].entry.length

    @property
    def length(self) -> int:
        return self.stop - self.start


def _place(entry: Entry, parts: list[Part]) -> memoryview | None:
    """The memory that a slice belongs into, if it is all there is to it: one piece of main memory, of the same type."""
    if len(parts) != 1 or intersection(entry.slice, parts[0].box) != entry.slice:
        return None
    place = parts[0].local.detach()[within(entry.slice, parts[0].box)]
    if place.device.type != "cpu" or place.dtype != DTYPES[entry.dtype] or not place.is_contiguous():
        return None
    return place.reshape(-1).view(torch.uint8).numpy().data


def _neighbours(key: str, slices: list[_Slice]) -> list[_Reading]:
    """Slices of a shard to be read in one go: with nothing unwanted of any size between them."""
    readings: list[_Reading] = []
    for one in sorted(slices, key=lambda one: one.entry.offset):
        last = readings[-1] if readings else None
        end = one.entry.offset + one.entry.length
        if last is not None and one.entry.offset - last.stop <= GAP and end - last.start <= TOGETHER:
            last.slices.append(one)
        else:
            readings.append(_Reading(key, one.entry.offset, [one]))
    return readings


def _portions(readings: list[_Reading]) -> Iterator[list[_Reading]]:
    """Readings with their places in a buffer, which the next portion uses again."""
    pin = any(part.local.is_cuda for reading in readings for one in reading.slices for part in one.parts)
    size = min(sum(reading.length for reading in readings), max([AT_ONCE, *(reading.length for reading in readings)]))
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin).numpy().data
    portion: list[_Reading] = []
    used = 0
    for reading in readings:
        if used + reading.length > size:
            yield portion
            portion, used = [], 0
        reading.into = buffer[used : used + reading.length]
        used += reading.length
        portion.append(reading)
    yield portion


def _read(store: Store, readings: list[_Reading]) -> None:
    """Read in parallel, and check and use each as soon as it is there."""
    ranges = []
    by_range: dict[int, _Reading] = {}
    for reading in readings:
        assert reading.into is not None
        ranges.append(Range(reading.key, reading.start, reading.into))
        by_range[id(ranges[-1])] = reading

    def done(item: Range) -> None:
        reading = by_range[id(item)]
        for one in reading.slices:
            start = one.entry.offset - reading.start
            one.use(item.into[start : start + one.entry.length], store, reading.key)

    try:
        store.read_into(ranges, done=done)
    except (StoreKeyMissing, StoreObjectShort) as error:
        raise Gone(str(error).rstrip(".")) from None
