"""A fine-tuned model as a folder that transformers reads: configuration, tokenizer, safetensors."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from trainrun.data.tokenizer import has_tokenizer, load_tokenizer
from trainrun.models.huggingface_files import INDEX, SINGLE
from trainrun.store import open_store

GENERATION = "generation_config.json"

LARGEST_FILE = 5 * 1000**3
"""Bytes of weights in one file, as hubs like it."""


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
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "float32"
    with tempfile.TemporaryDirectory(prefix="trainrun-export-") as temporary:
        folder = Path(temporary)
        model.config.save_pretrained(folder)
        if has_tokenizer(source):
            load_tokenizer(source).save_pretrained(folder)
        if (source / GENERATION).is_file():
            shutil.copy(source / GENERATION, folder)
        _write_weights(tensors, folder, largest_file)
        store = open_store(url)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                store.put_file(path.relative_to(folder).as_posix(), path)


def _write_weights(tensors: Iterable[tuple[str, Tensor]], folder: Path, largest_file: int) -> None:
    from safetensors.torch import save_file

    files: list[Path] = []
    places: dict[str, int] = {}
    total = size = 0
    held: dict[str, Tensor] = {}

    def write() -> None:
        files.append(folder / f"part-{len(files)}")
        save_file(held, files[-1], metadata={"format": "pt"})
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > largest_file:
            write()
            size = 0
        held[name] = tensor.contiguous()
        places[name] = len(files)
        size += tensor.nbytes
        total += tensor.nbytes
    write()
    if len(files) == 1:
        files[0].rename(folder / SINGLE)
        return
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    for path, name in zip(files, names, strict=True):
        path.rename(folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": {name: names[place] for name, place in sorted(places.items())}}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
