"""From another library's checkpoint to one of trainrun's, committed like any other.

One shard is in memory at a time. What the source holds is read once, as data (`trainrun.checkpoint.pickles`).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import trainrun
from trainrun.checkpoint import convert_dcp, convert_deepspeed, convert_universal
from trainrun.checkpoint.foreign import Foreign
from trainrun.checkpoint.layout import Commit, Shard, commit_key, contradiction, new_attempt
from trainrun.checkpoint.packing import ShardWriter
from trainrun.checkpoint.parts import Part, to_write
from trainrun.checkpoint.write import write_commit
from trainrun.config import ConfigError
from trainrun.errors import CheckpointError
from trainrun.store import Store, StoreError

SHARD_SIZE = 512 * 1024**2
"""Bytes after which another shard is begun; also about the most memory that a conversion takes."""

Rename = tuple[re.Pattern[str], str]
"""A pattern in parameters' names, and what comes in its place."""


@dataclass
class Choice:
    """What of a source is carried over, and by which names."""

    renames: list[Rename] = field(default_factory=list)
    """For parameters whose names are others in the model that is to go on; one after the other."""
    drop: re.Pattern[str] | None = None
    """Parameters and buffers whose new names have a match of this are left."""
    parameters_only: bool = False
    """Whether the optimizer's state is left."""
    trained: set[str] = field(default_factory=set)
    """Parameters of which the source has optimizer state; complete once the parts are used up."""

    def of(self, parts: Iterable[Part], done: Callable[[int], None]) -> Iterator[Part]:
        """The parts that are wanted, by their new names, in pieces as small as in any checkpoint."""
        for part in parts:
            done(part.local.nbytes)
            kind, _, name = part.name.partition("/")
            name, slash, key = name.rpartition("/") if kind == "optimizer" else (name, "", "")
            for pattern, replacement in self.renames:
                name = pattern.sub(replacement, name)
            if kind == "optimizer":
                self.trained.add(name)
            if (kind == "optimizer" and self.parameters_only) or (self.drop and self.drop.search(name)):
                continue
            yield from to_write([replace(part, name=f"{kind}/{name}{slash}{key}")])


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
    choice: Choice | None = None,
    done: Callable[[int], None] = lambda count: None,
) -> Converted:
    """Write ``source`` as a committed checkpoint.

    Args:
        source: its parts are used up.
        target: the run's folder.
        step: in place of what the source says.
        settings: the resolved `trainrun.settings.TrainSettings` of the run that is to go on from it; without them only what
            `resume` must know, so that `trainrun evaluate` and `generate` cannot rebuild the model.
        choice: of what the source has; all of it if not given.
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
    choice = choice or Choice()
    attempt = new_attempt()
    writer = ShardWriter(target, number, attempt, size=SHARD_SIZE)
    try:
        for part in choice.of(source.parts, done):
            writer.add(part)
        writer.end()
        shards, tied = _without_aliases(writer.shards, choice.trained)
        commit = _commit(source, target, number, attempt, settings, shards)
        if problem := contradiction(commit, number):
            raise CheckpointError(f"The source is not whole: {problem}. Nothing was committed.")
        if not write_commit(target, commit):
            raise CheckpointError(f"Another {target.locate(commit_key(number))} was written meanwhile; that one stays.")
    except BaseException:
        with contextlib.suppress(StoreError):
            writer.remove()
        raise
    counted_anew = "Tokens trained on so far are counted from 0: the source does not tell them."
    return Converted(commit, source.format, (*source.left_out, *tied, counted_anew))


def _commit(
    source: Foreign, target: Store, step: int, attempt: str, settings: dict[str, Any] | None, shards: list[Shard]
) -> Commit:
    return Commit(
        run=target.url.rpartition("/")[2],
        step=step,
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


def parse_rename(text: str) -> Rename:
    """``PATTERN=REPLACEMENT``, as `re.sub` takes them.

    Raises:
        ConfigError: it is none.
    """
    pattern, equals, replacement = text.partition("=")
    example = "Write PATTERN=REPLACEMENT, such as '^=model.' or '^transformer[.]=blocks.'."
    if not equals:
        raise ConfigError([f"{text!r} is no renaming, since it has no equals sign. {example}"])
    compiled = parse_pattern(pattern)
    try:
        re.sub(f"{pattern}|", replacement, "")
    except (re.error, IndexError) as error:
        raise ConfigError([f"{text!r} is no renaming: {error} in what comes after the equals sign. {example}"]) from None
    return compiled, replacement


def parse_pattern(text: str) -> re.Pattern[str]:
    """A regular expression, as Python has them.

    Raises:
        ConfigError: it is none.
    """
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError([f"{text!r} is no regular expression: {error}."]) from None


def _without_aliases(shards: list[Shard], trained: set[str]) -> tuple[list[Shard], list[str]]:
    """Without the further names of tied weights, which trainrun's checkpoints do not have.

    A matrix is one when it has no optimizer state and is bit for bit what one with state is.
    """
    content: dict[str, list[tuple[Any, ...]]] = {}
    for shard in shards:
        for name, entries in shard.tensors.items():
            content.setdefault(name, []).extend((entry.shape, entry.slice, entry.sha256) for entry in entries)
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
