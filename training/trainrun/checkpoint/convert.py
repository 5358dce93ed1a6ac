"""From another library's checkpoint to one of trainrun's, committed like any other.

One shard is in memory at a time. What the source holds is read once, as data (`trainrun.checkpoint.pickles`).
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import trainrun
from trainrun.checkpoint import convert_dcp, convert_deepspeed, convert_universal
from trainrun.checkpoint.foreign import Foreign
from trainrun.checkpoint.layout import Commit, Entry, Shard, commit_key, contradiction, new_attempt, shard_key
from trainrun.checkpoint.parts import Part, to_write
from trainrun.checkpoint.write import ALIGNMENT, write_commit
from trainrun.config import ConfigError
from trainrun.errors import CheckpointError
from trainrun.store import Store

SHARD_SIZE = 512 * 1024**2
"""Bytes after which another shard is begun; also about the most memory that a conversion takes."""

Rename = tuple[re.Pattern[str], str]
"""A pattern in parameters' names, and what comes in its place."""


@dataclass(frozen=True)
class Converted:
    """What a conversion made."""

    commit: Commit
    format: str
    """What wrote the source."""
    remarks: tuple[str, ...]
    """Sentences: what was not carried over."""


def open_foreign(store: Store) -> Foreign:
    """The checkpoint at ``store``, of whichever library.

    Raises:
        CheckpointError: there is none that is known, or it cannot be read.
    """
    if (folder := convert_deepspeed.folder_of(store)) is not None:
        if convert_deepspeed.is_universal(folder):
            return convert_universal.read_universal(folder)
        return convert_deepspeed.read_deepspeed(folder)
    if any(item.key == convert_dcp.METADATA for item in store.list(convert_dcp.METADATA)):
        return convert_dcp.read_dcp(store)
    raise CheckpointError(
        f"There is no checkpoint at {store.url} that convert reads. It reads those of DeepSpeed's ZeRO (a folder with the file "
        f"latest, or with *_model_states.pt) and of torch.distributed.checkpoint (a folder with {convert_dcp.METADATA})."
    )


def convert(
    source: Foreign,
    target: Store,
    *,
    step: int | None = None,
    settings: dict[str, Any] | None = None,
    renames: Iterable[Rename] = (),
    parameters_only: bool = False,
    done: Callable[[int], None] = lambda count: None,
) -> Converted:
    """Write ``source`` as a committed checkpoint.

    Args:
        source: its parts are used up.
        target: the run's folder.
        step: in place of what the source says.
        settings: the resolved `trainrun.settings.TrainSettings` of the run that is to go on from it; without them only what
            `resume` must know, so that `trainrun evaluate` and `generate` cannot rebuild the model.
        renames: for parameters whose names are others in the model that is to go on.
        parameters_only: leave the optimizer's state.
        done: told of each number of bytes that was read.

    Raises:
        CheckpointError: the source does not say its step, or has not all of a tensor; or there is a commit of this step.
        StoreError: the target could not be written.
    """
    number = source.step if step is None else step
    if number is None:
        raise CheckpointError("The source does not say how many steps it was trained. Give their number with --step.")
    if any(item.key == commit_key(number) for item in target.list(commit_key(number))):
        raise CheckpointError(
            f"There is {target.locate(commit_key(number))} already, and nothing is overwritten. Name another run."
        )
    attempt = new_attempt()
    writer = _ShardWriter(target, number, attempt)
    for part in _chosen(source.parts, list(renames), parameters_only, done):
        writer.add(part)
    writer.end()
    shards, remark = _without_aliases(writer.shards)
    commit = Commit(
        run=str((settings or {}).get("run", target.url.rpartition("/")[2])),
        step=number,
        tokens=0,
        attempt=attempt,
        time=time.time(),
        world=len(shards),
        mesh={},
        data={},
        settings=settings or {"optimizer": {"name": "adamw"}},
        versions={"trainrun": trainrun.__version__, "torch": torch.__version__, "converted_from": source.format},
        shards=tuple(shards),
    )
    if problem := contradiction(commit, number):
        raise CheckpointError(f"The source is not whole: {problem}. Nothing was committed.")
    if not write_commit(target, commit):
        raise CheckpointError(f"Another {target.locate(commit_key(number))} was written meanwhile; that one stays.")
    return Converted(commit, source.format, (*source.left_out, *remark))


def parse_rename(text: str) -> Rename:
    """``PATTERN=REPLACEMENT``, as `re.sub` takes them.

    Raises:
        ConfigError: it is none.
    """
    pattern, equals, replacement = text.partition("=")
    try:
        if not equals:
            raise re.error("it has no equals sign")
        compiled = re.compile(pattern)
        re.sub(compiled, replacement, "")
        return compiled, replacement
    except (re.error, IndexError) as error:
        raise ConfigError(
            [f"{text!r} is no renaming ({error}). Write PATTERN=REPLACEMENT, such as '^=model.' or '^transformer[.]=blocks.'."]
        ) from None


def _chosen(parts: Iterable[Part], renames: list[Rename], parameters_only: bool, done: Callable[[int], None]) -> Iterator[Part]:
    """The parts that are wanted, by their new names, in pieces as small as in any checkpoint."""
    for part in parts:
        done(part.local.nbytes)
        kind, _, name = part.name.partition("/")
        if parameters_only and kind != "model":
            continue
        name, slash, key = name.rpartition("/") if kind == "optimizer" else (name, "", "")
        for pattern, replacement in renames:
            name = pattern.sub(replacement, name)
        yield from to_write([replace(part, name=f"{kind}/{name}{slash}{key}")])


class _ShardWriter:
    """Puts one part behind the other into a block of memory, and each full block into the store.

    Attributes:
        shards: that are written.
    """

    def __init__(self, target: Store, step: int, attempt: str) -> None:
        self.shards: list[Shard] = []
        self._target, self._step, self._attempt = target, step, attempt
        self._block = torch.empty(SHARD_SIZE, dtype=torch.uint8)  # takes memory as it is filled
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
        digest = hashlib.sha256(data).hexdigest()
        self.shards.append(Shard(key=key, length=self._size, sha256=digest, tensors=self._tensors))
        self._size, self._tensors = 0, {}


def _without_aliases(shards: list[Shard]) -> tuple[list[Shard], list[str]]:
    """Without the further names of tied weights, which trainrun's checkpoints do not have.

    A matrix is one when it has no optimizer state and is bit for bit what one with state and a name before it is.
    """
    content: dict[str, list[tuple[Any, ...]]] = {}
    for shard in shards:
        for name, entries in shard.tensors.items():
            content.setdefault(name, []).extend((entry.shape, entry.slice, entry.sha256) for entry in entries)
    trained = {name.removeprefix("optimizer/").rpartition("/")[0] for name in content if name.startswith("optimizer/")}
    matrices = {name: sorted(boxes) for name, boxes in content.items() if name.startswith("model/") and len(boxes[0][0]) > 1}
    originals = {repr(boxes): name for name, boxes in matrices.items() if name.removeprefix("model/") in trained}
    aliases = {
        name: originals[repr(boxes)]
        for name, boxes in matrices.items()
        if name.removeprefix("model/") not in trained and repr(boxes) in originals
    }
    if not aliases:
        return shards, []
    kept = [replace(s, tensors={name: e for name, e in s.tensors.items() if name not in aliases}) for s in shards]
    pairs = ", ".join(f"{name.removeprefix('model/')} (is {aliases[name].removeprefix('model/')})" for name in sorted(aliases))
    return kept, [f"Tied weights are kept once: {pairs}."]
