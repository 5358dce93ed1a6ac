"""How a run's checkpoints lie in a store::

    step-000000500/<attempt>/rank-00003.bin      never overwritten
    step-000000500/COMMIT.json                   written last, and only if there is none yet

A checkpoint exists when its COMMIT exists. A shard is raw tensor bytes; everything about them is in the COMMIT, which
is JSON and is checked before anything is believed. Nothing here is ever unpickled. A tensor lies in slices, in any
number of shards and several to a shard; which ranks and which strategy wrote them makes no difference to a reader.

No torch: the process that writes a checkpoint has none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import math
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trainrun.checkpoint.parts import cover
from trainrun.config import ConfigError, from_mapping
from trainrun.errors import CheckpointError
from trainrun.store import Store

SCHEMA_VERSION = 3
COMMIT = "COMMIT.json"

ITEM_SIZES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16},
}
"""Bytes of an element of each type that a tensor may have, by torch's name of it."""

LARGEST_COMMIT = 2 * 1024**3
"""Bytes of a COMMIT above which it is not read: several millions of slices."""

_STEP = r"step-([0-9]{9}|[1-9][0-9]{9,17})"
_COMMIT_KEY = re.compile(_STEP + r"/COMMIT\.json")
_SHARD_KEY = re.compile(_STEP + r"/([0-9A-Za-z-]+)/rank-([0-9]{5,9})\.bin")


T = TypeVar("T")

_OURS = re.compile(
    r"step-(\d{9,})/(?:(?:COMMIT|DAMAGED-[0-9A-Za-z-]+)\.json|[0-9A-Za-z-]+/rank-\d{5,}\.(?:bin|json))(?:\.[0-9a-f]+\.partial)?"
)


class Damaged(Exception):
    """A checkpoint is not what its COMMIT says, or its COMMIT is not one; the one before it may be good."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a slice of a tensor, or all of it, lies in a shard."""

    offset: int
    length: int
    """Bytes."""
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    slice: tuple[tuple[int, int], ...]
    """Start and stop in each dimension of the whole."""
    sha256: str

    @property
    def extent(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return tuple(stop - start for start, stop in self.slice)


_ENTRY_FIELDS = {each.name for each in dataclasses.fields(Entry)}


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One object of tensor bytes."""

    key: str
    """Relative to the run's folder."""
    length: int
    sha256: str
    """`digest_of` the slices: the bytes are hashed once, by the slice that a reader checks them by."""
    tensors: dict[str, tuple[Entry, ...]]
    """The slices that it has of each tensor."""
    values: dict[str, Any] = field(default_factory=dict)
    """Small JSON values by name, beside the tensors."""

    def to_json(self) -> str:
        """The document that describes it."""
        return _json(self.fields()) + "\n"

    def fields(self) -> dict[str, Any]:
        """The mapping that JSON has of it."""
        return {**_fields(self), "tensors": self.tensors}


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The content of a COMMIT.json."""

    run: str
    step: int
    tokens: int
    """Trained on so far."""
    attempt: str
    time: float
    """Seconds since the epoch."""
    world: int
    """Ranks that wrote it."""
    mesh: dict[str, int]
    data: dict[str, Any]
    """State of the data stream: position and fingerprint; empty when the run has none."""
    settings: dict[str, Any]
    """The resolved `trainrun.settings.TrainSettings`."""
    versions: dict[str, str]
    shards: tuple[Shard, ...]
    metric: float | None = None
    """What was given to ``state.save(metric=...)``, for checkpoint.keep_best and for people."""
    sha256: str = ""
    """Digest of everything else here, which `to_json` puts in: a flipped digit in it must not pass for another position."""
    schema: int = SCHEMA_VERSION

    @property
    def bytes(self) -> int:
        """Length of all shards."""
        return sum(shard.length for shard in self.shards)

    def values(self) -> dict[str, Any]:
        """The values of all shards."""
        return {name: value for shard in self.shards for name, value in shard.values.items()}

    def to_json(self) -> str:
        """The document with its digest, keys sorted."""
        content = {**_fields(self), "shards": [shard.fields() for shard in self.shards]}
        return _json({**content, "sha256": _digest(content)}) + "\n"


def digest_of(entries: Iterable[Entry]) -> str:
    """One digest for all slices of a shard: sha256 over theirs, in the order in which they lie."""
    ordered = sorted(entries, key=lambda entry: (entry.offset, entry.length))
    return hashlib.sha256("".join(entry.sha256 for entry in ordered).encode()).hexdigest()


def step_directory(step: int) -> str:
    """The key prefix of a step."""
    return f"step-{step:09}"


def commit_key(step: int) -> str:
    """The key of a step's COMMIT."""
    return f"{step_directory(step)}/{COMMIT}"


def step_of(key: str) -> int | None:
    """The step to which an object belongs that trainrun wrote; None for any other, which is not trainrun's to judge or delete."""
    match = _OURS.fullmatch(key)
    return int(match[1]) if match else None


def shard_key(step: int, attempt: str, rank: int) -> str:
    """The key of one rank's shard."""
    return f"{step_directory(step)}/{attempt}/rank-{rank:05}.bin"


def new_attempt() -> str:
    """An id that no other attempt has, with its time for people."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:12]}"


def committed_steps(store: Store) -> list[int]:
    """The steps that have a COMMIT, oldest first, by number."""
    return sorted(int(match[1]) for item in store.list("step-") if (match := _COMMIT_KEY.fullmatch(item.key)))


def read_commit(store: Store, step: int) -> Commit:
    """Read and check the COMMIT of a step.

    Raises:
        Damaged: it is not one, or contradicts itself.
        CheckpointError: it was written by another version of trainrun.
        StoreError: it could not be read.
    """
    return parse_commit(commit_text(store, step), step)


def commit_text(store: Store, step: int) -> str:
    """A step's COMMIT as it lies in the store, unchecked; raises StoreError."""
    return store.get(commit_key(step), 0, LARGEST_COMMIT).decode(errors="replace")


def parse_commit(text: str, step: int) -> Commit:
    """Check the text of a step's COMMIT; see `read_commit`."""
    with _without_collecting():
        return _parse_commit(text, step)


def _parse_commit(text: str, step: int) -> Commit:
    name = commit_key(step)
    try:
        mapping = _object(text)
        if mapping.get("sha256") != _digest(mapping):
            raise Damaged(f"{name} is not what was written (sha256 differs)")
        if mapping.get("schema", SCHEMA_VERSION) != SCHEMA_VERSION:
            raise CheckpointError(
                f"{name} has schema {mapping['schema']!r}, this trainrun reads {SCHEMA_VERSION}. "
                "Restore it with the version that wrote it."
            )
        commit = from_mapping(Commit, {**mapping, "shards": []}, source=name)
        shards = tuple(_shard(fields) for fields in _typed(mapping.get("shards"), list, "shards"))
    except ConfigError as error:
        raise Damaged(f"{name} is not a COMMIT: {error.problems[0]:.300}") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} is not JSON: {error}") from None
    commit = dataclasses.replace(commit, shards=shards)
    problem = contradiction(commit, step)
    if problem:
        raise Damaged(f"{name} contradicts itself: {problem}")
    return commit


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Keep the garbage collector from looking through hundreds of thousands of new objects again and again: 2/3 of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def parse_shard(text: str, source: str) -> Shard:
    """What `Shard.to_json` wrote; whether its slices fit is for `contradiction` to say.

    Raises:
        Damaged: it is no such thing.
    """
    try:
        return _shard(_object(text))
    except ConfigError as error:
        raise Damaged(f"{source} does not describe a shard: {error.problems[0]:.300}") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{source} is not JSON: {error}") from None


def _object(text: str) -> dict[str, Any]:
    return _typed(json.loads(text), dict, "the whole")


def _shard(fields: Any) -> Shard:
    """A shard of its JSON. By hand, and not by `from_mapping`, for there may be a million entries."""
    head = {key: value for key, value in _typed(fields, dict, "a shard").items() if key != "tensors"}
    shard = from_mapping(Shard, {**head, "tensors": {}}, source="a shard")
    tensors = {
        name: tuple([_entry(entry, name) for entry in _typed(entries, list, name)])
        for name, entries in _typed(fields.get("tensors"), dict, "tensors").items()
    }
    return dataclasses.replace(shard, tensors=tensors)


def _entry(fields: Any, name: str) -> Entry:
    if _typed(fields, dict, name).keys() != _ENTRY_FIELDS:
        raise ConfigError([f"a slice of {name} has other fields than {', '.join(sorted(_ENTRY_FIELDS))}"])
    shape, bounds, dtype, digest = fields["shape"], fields["slice"], fields["dtype"], fields["sha256"]
    numbers = [fields["offset"], fields["length"], *_typed(shape, list, name)]
    for pair in _typed(bounds, list, name):
        if type(pair) is not list or len(pair) != 2:
            raise ConfigError([f"a slice of {name} has bounds that are no pairs"])
        numbers += pair
    if set(map(type, numbers)) != {int} or type(dtype) is not str or type(digest) is not str:
        raise ConfigError([f"a slice of {name} has a field of a wrong type"])
    return Entry(
        offset=fields["offset"],
        length=fields["length"],
        dtype=dtype,
        shape=tuple(shape),
        slice=tuple([(start, stop) for start, stop in bounds]),
        sha256=digest,
    )


def _typed(value: Any, kind: type[T], name: str) -> T:
    if type(value) is not kind:
        raise ConfigError([f"{name} is no {kind.__name__}, but {type(value).__name__}"])
    return value


def _digest(content: dict[str, Any]) -> str:
    """sha256 of a COMMIT's content, however it is laid out."""
    return hashlib.sha256(_json({key: value for key, value in content.items() if key != "sha256"}).encode()).hexdigest()


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, default=vars)  # an entry is the mapping of its fields


def _fields(one: Commit | Shard) -> dict[str, Any]:
    """What JSON has of all fields but shards and tensors: keys are texts there, by which they are sorted for the digest."""
    mapping: dict[str, Any] = json.loads(json.dumps({k: v for k, v in vars(one).items() if k not in ("shards", "tensors")}))
    return mapping


def contradiction(commit: Commit, step: int) -> str | None:
    """What cannot be in a commit of ``step``, whatever the shards hold; None when there is nothing."""
    if commit.step != step:
        return f"it says step {commit.step}"
    if len(commit.shards) != commit.world or not commit.shards:
        return f"{commit.world} ranks wrote {len(commit.shards)} shards"
    if len({shard.key for shard in commit.shards}) < len(commit.shards):
        return "two of its shards are the same"
    if commit.tokens < 0 or not math.isfinite(commit.time):
        return f"it says {commit.tokens} tokens, at the time {commit.time}"
    slices: dict[str, list[Entry]] = {}
    for shard in commit.shards:
        match = _SHARD_KEY.fullmatch(shard.key)
        if not match or int(match[1]) != commit.step or match[2] != commit.attempt:
            return f"the shard {shard.key!r} is not one of this attempt"
        for name, entries in shard.tensors.items():
            if not entries or not all(_fits(entry, shard.length) for entry in entries):
                return f"the tensor {name!r} does not fit in {shard.key}"
            slices.setdefault(name, []).extend(entries)
        if _overlap(entry for entries in shard.tensors.values() for entry in entries):
            return f"slices share bytes of {shard.key}"
    return next((problem for name, entries in slices.items() if (problem := _incomplete(name, entries))), None)


def _fits(entry: Entry, shard_length: int) -> bool:
    inside = len(entry.slice) == len(entry.shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(entry.slice, entry.shape, strict=True)
    )
    if entry.dtype not in ITEM_SIZES or not inside or entry.offset < 0:
        return False
    return entry.length == math.prod(entry.extent) * ITEM_SIZES[entry.dtype] and entry.offset + entry.length <= shard_length


def _overlap(entries: Iterable[Entry]) -> bool:
    """Whether some share bytes of their shard."""
    end = 0
    for offset, length in sorted([(entry.offset, entry.length) for entry in entries]):
        if offset < end:
            return True
        end = offset + length
    return False


def _incomplete(name: str, entries: list[Entry]) -> str | None:
    """Whether slices are not of one tensor, leave something of it out, or hold something twice."""
    first = entries[0]
    alike = all((entry.shape, entry.dtype) == (first.shape, first.dtype) for entry in entries)
    if not alike or not cover([entry.slice for entry in entries], first.shape):
        return f"the slices of the tensor {name} do not make up a whole of {first.dtype} {list(first.shape)}"
    return None
