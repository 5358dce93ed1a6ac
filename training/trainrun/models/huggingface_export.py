"""A fine-tuned model as a folder that transformers reads: configuration, tokenizer, safetensors."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from trainrun.data.tokenizer import has_tokenizer, load_tokenizer
from trainrun.models.safetensors_write import LARGEST_FILE, file_names, write_index
from trainrun.store import open_store

GENERATION = "generation_config.json"


def export_model(
    model: Any, tensors: Iterable[tuple[str, Tensor]], url: str, *, source: Path, largest_file: int = LARGEST_FILE
) -> None:
    """Write a model to a folder or ``s3://bucket/prefix``.

    Args:
        model: of transformers, for its configuration.
        tensors: the whole weights, by transformers' names; taken one after the other.
        source: the folder from which the model came; its tokenizer and how it generates are taken along.
        largest_file: bytes of weights after which another file is begun.
    """
    with tempfile.TemporaryDirectory(prefix="trainrun-export-") as temporary:
        folder = Path(temporary)
        write_configuration(model.config, folder, architecture=type(model).__name__, dtype="float32")
        take_along(source, folder)
        _write_weights(tensors, folder, largest_file)
        store = open_store(url)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                store.put_file(path.relative_to(folder).as_posix(), path)


def write_configuration(config: Any, folder: Path, *, architecture: str, dtype: str) -> None:
    """Write the ``config.json`` of a model of transformers, with the name of its class and the type of its weights."""
    config.architectures = [architecture]
    config.dtype = dtype
    config.save_pretrained(folder)


def take_along(source: Path, folder: Path) -> None:
    """Copy from a model's folder its tokenizer, and how it generates, as far as it has them."""
    if has_tokenizer(source):
        load_tokenizer(source).save_pretrained(folder)
    if (source / GENERATION).is_file():
        shutil.copy(source / GENERATION, folder)


def _write_weights(tensors: Iterable[tuple[str, Tensor]], folder: Path, largest_file: int) -> None:
    """Write tensors of which neither number nor sizes are known before: as much as a file holds is kept in memory."""
    from safetensors.torch import save_file

    parts: list[list[str]] = []
    total = size = 0
    held: dict[str, Tensor] = {}

    def write() -> None:
        save_file(held, folder / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > largest_file:
            write()
            size = 0
        held[name] = tensor.contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    write()
    names = file_names(len(parts))
    for number, name in enumerate(names):
        (folder / f"part-{number}").rename(folder / name)
    if len(names) > 1:
        write_index(folder, dict(zip(names, parts, strict=True)), total)
