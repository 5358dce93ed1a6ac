"""Checkpoints of torch.distributed.checkpoint, such as those of FSDP2, as parts of whole tensors by name.

Their ``.metadata`` tells, for each tensor, of which chunks it consists and where they lie; each chunk is a file of
``torch.save`` of its own within a larger one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainrun.checkpoint.foreign import Foreign
from trainrun.checkpoint.layout import ITEM_SIZES
from trainrun.checkpoint.parts import Part
from trainrun.checkpoint.pickles import load_dcp_metadata, load_tensor
from trainrun.checkpoint.tensors import canonical
from trainrun.errors import CheckpointError
from trainrun.store import Store

METADATA = ".metadata"

MOST_NAMED = 10
"""Things left out that are named."""


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor, and the bytes that have it."""

    start: tuple[int, ...]
    extent: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class _Stored:
    """A tensor."""

    path: tuple[Any, ...]
    """Where it was in the dictionary that was saved."""
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


def read_dcp(store: Store) -> Foreign:
    """A checkpoint from its folder.

    Raises:
        CheckpointError: its metadata cannot be read, or it has no tensors that could be a model's.
    """
    place = store.locate(METADATA)
    metadata = load_dcp_metadata(store.get(METADATA), place)
    try:
        stored = _stored_tensors(metadata)
        others = [name for name, item in metadata.state_dict_metadata.items() if type(item).__name__ == "BytesStorageMetadata"]
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{place} is no metadata of torch.distributed.checkpoint: {error}.") from None
    names, left_out = _names(stored)
    if not any(name.startswith("model/") for name in names.values()):
        raise CheckpointError(f"{place} names no tensors of a model.")
    unused = [name for name in (*stored, *others) if name not in names and "param_groups" not in name]
    if unused:
        more = f" and {len(unused) - MOST_NAMED} more" if len(unused) > MOST_NAMED else ""
        left_out.append(
            f"Not carried over, since it is neither model nor optimizer state: {', '.join(unused[:MOST_NAMED])}{more}."
        )
    left_out.append("Random streams and the position in the data are not carried over.")
    return Foreign(
        format="torch.distributed.checkpoint",
        step=_step(store, stored, names),
        bytes=sum(stored[name].bytes for name in names),
        parts=_parts(store, stored, names),
        left_out=left_out,
    )


def _stored_tensors(metadata: Any) -> dict[str, _Stored]:
    places: dict[tuple[str, Any], Any] = {
        (index.fqn, getattr(index, "offset", None)): info for index, info in metadata.storage_data.items()
    }
    paths = metadata.planner_data or {}
    stored = {}
    for name, item in metadata.state_dict_metadata.items():
        if type(item).__name__ != "TensorStorageMetadata":
            continue
        chunks = []
        for chunk in item.chunks:
            info = places[name, chunk.offsets]
            if getattr(info, "transform_descriptors", None):
                raise ValueError(f"{name} was compressed or transformed, which convert does not undo")
            if info.relative_path.startswith("/") or ".." in info.relative_path:
                raise ValueError(f"{name} would lie outside of the checkpoint's folder, in {info.relative_path}")
            chunks.append(_Chunk(chunk.offsets, chunk.sizes, str(info.relative_path), int(info.offset), int(info.length)))
        dtype = item.properties.state[0]
        if dtype not in ITEM_SIZES:
            raise ValueError(f"{name} is of a type that checkpoints here do not have")
        stored[name] = _Stored(tuple(paths.get(name, (name,))), dtype, item.size, tuple(chunks))
    return stored


def _names(stored: dict[str, _Stored]) -> tuple[dict[str, str], list[str]]:
    """Our names for the tensors that are a model's or an optimizer's, and sentences on what is not taken."""
    names: dict[str, str] = {}
    left_out = []
    numbered = False
    candidates: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in stored.items():
        path = tensor.path
        if len(path) >= 3 and path[-3] == "state":
            if str(path[-2]).isdecimal():  # torch makes texts of numbers too
                numbered = True
            else:
                names[name] = f"optimizer/{canonical(path[-2])}/{path[-1]}"
        elif str(path[-1]).startswith("state."):
            parameter, _, key = str(path[-1]).removeprefix("state.").rpartition(".")
            names[name] = f"optimizer/{canonical(parameter)}/{key}"
        elif not str(path[-1]).startswith("param_groups."):
            candidates.setdefault(path[:-1], []).append(name)
    if numbered:
        left_out.append(
            "Its optimizer state is by number, not by name: only parameters were carried over. "
            "torch.distributed.checkpoint.state_dict.get_state_dict saves it by name."
        )
    if candidates:
        for name in candidates[_of_the_model(candidates, stored)]:
            names[name] = f"model/{canonical(str(stored[name].path[-1]))}"
    return names, left_out


def _of_the_model(candidates: dict[tuple[Any, ...], list[str]], stored: dict[str, _Stored]) -> tuple[Any, ...]:
    """Which of several dictionaries is the model's: the one of that name, else the largest."""
    return max(candidates, key=lambda path: (path[-1:] == ("model",), sum(stored[name].bytes for name in candidates[path])))


def _step(store: Store, stored: dict[str, _Stored], names: dict[str, str]) -> int | None:
    """The steps that the optimizer counted, by the first of its counters."""
    counter = next((name for name, ours in names.items() if ours.startswith("optimizer/") and ours.endswith("/step")), None)
    if counter is None:
        return None
    tensor = _read(store, counter, stored[counter], stored[counter].chunks[0])
    return int(tensor) if tensor.numel() == 1 else None


def _parts(store: Store, stored: dict[str, _Stored], names: dict[str, str]) -> Iterator[Part]:
    """In the order of the files."""
    everything = [(chunk, name) for name in names for chunk in stored[name].chunks]
    for chunk, name in sorted(everything, key=lambda item: (item[0].file, item[0].offset)):
        tensor = _read(store, name, stored[name], chunk)
        if names[name].startswith("model/") and tensor.is_floating_point():
            tensor = tensor.float()
        yield Part(names[name], tensor, stored[name].shape, chunk.start)


def _read(store: Store, name: str, stored: _Stored, chunk: _Chunk) -> Tensor:
    tensor = load_tensor(store.get(chunk.file, chunk.offset, chunk.length), f"{name} in {store.locate(chunk.file)}").detach()
    kind = str(tensor.dtype).removeprefix("torch.")
    if (kind, tuple(tensor.shape)) != (stored.dtype, chunk.extent):
        raise CheckpointError(
            f"{name} is {kind} {list(tensor.shape)} in {store.locate(chunk.file)}, but {stored.dtype} {list(chunk.extent)} by "
            f"{METADATA}: the checkpoint is damaged."
        )
    return tensor
