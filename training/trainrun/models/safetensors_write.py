"""Safetensors files as hubs and transformers read them: several of a bounded size, with an index.

A file is eight bytes with the length of a JSON header, the header, and the tensors' bytes one behind the other
(github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainrun.config import ConfigError
from trainrun.models.huggingface_files import INDEX, SINGLE

LARGEST_FILE = 5 * 1000**3
"""Bytes of weights in one file, as hubs like it."""

TYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64"},
}


@dataclass(frozen=True)
class Kind:
    """A tensor that is to be in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def file_names(count: int) -> list[str]:
    """The names of a model's files."""
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def write_index(folder: Path, files: dict[str, list[str]], total: int) -> None:
    """Write the file that tells which tensors (of ``total`` bytes) are in which of several files."""
    places = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def divide(kinds: Iterable[Kind], largest_file: int) -> list[list[Kind]]:
    """Which tensors go into one file: as many as fit, at least one.

    Raises:
        ConfigError: safetensors has not a tensor's type.
    """
    files: list[list[Kind]] = [[]]
    for kind in kinds:
        if kind.dtype not in TYPES:
            raise ConfigError([f"{kind.name} is of type {kind.dtype}, which safetensors files cannot hold. Give --dtype."])
        if files[-1] and sum(other.bytes for other in files[-1]) + kind.bytes > largest_file:
            files.append([])
        files[-1].append(kind)
    return files


@contextmanager
def mapped_file(path: Path, kinds: list[Kind]) -> Iterator[dict[str, Tensor]]:
    """A new file with room for tensors, which lie in it: what is written to them is in the file, and takes no memory.

    Raises:
        OSError: the file cannot be made, or there is not enough room for it.
    """
    ordered = sorted(kinds, key=lambda kind: -kind.dtype.itemsize)  # so that each begins at a multiple of its elements' size
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for kind in ordered:
        entries[kind.name] = {"dtype": TYPES[kind.dtype], "shape": list(kind.shape), "data_offsets": [end, end + kind.bytes]}
        end += kind.bytes
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    start = 8 + len(header)
    with path.open("xb+") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.flush()
        _take_room(file.fileno(), start + end)
        memory = mmap.mmap(file.fileno(), start + end)
        tensors = {}
        for kind in ordered:
            tensors[kind.name] = _tensor_at(memory, start, kind)
            start += kind.bytes
        yield tensors
        memory.flush()
        os.fsync(file.fileno())


def _take_room(descriptor: int, size: int) -> None:
    """Take the file's room on the disk now: a mapped file that finds none later ends the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def _tensor_at(memory: mmap.mmap, start: int, kind: Kind) -> Tensor:
    if not kind.bytes:  # torch maps no tensor of no bytes
        return torch.empty(kind.shape, dtype=kind.dtype)
    return torch.frombuffer(memory, dtype=kind.dtype, count=math.prod(kind.shape), offset=start).view(kind.shape)
