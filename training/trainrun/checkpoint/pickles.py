"""Files of other libraries that are pickles, read as data: whatever they ask to be called is not called.

The classes that DeepSpeed and torch.distributed.checkpoint put into their files become records of the same content. A file
that refers to anything else is refused before it is read, since its names are all that a pickle can run code by.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trainrun.checkpoint.layout import ITEM_SIZES
from trainrun.errors import CheckpointError
from trainrun.words import counted

HARMLESS = re.compile(
    r"(deepspeed|numpy|lightning|pytorch_lightning|transformers)\..*|argparse\.Namespace|pathlib(\._local)?\.\w*Path"
)
"""Names that training frameworks put beside the tensors. They are read as records, whatever they are."""

_ZIP = b"PK\x03\x04"


class Record:
    """Stands for an object of another library's class: with its content, without its code."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __new__(cls, *args: Any) -> Record:
        record = super().__new__(cls)
        record.args = args
        return record

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


def load_torch_file(path: Path) -> Any:
    """What ``torch.save`` put into a file; its tensors are mapped, not read.

    Raises:
        CheckpointError: the file is no such file, is not whole, or refers to code.
    """
    with path.open("rb") as file:
        if file.read(len(_ZIP)) != _ZIP:
            raise CheckpointError(
                f"{path} is no file of torch.save, or one of a torch before 1.6. Save it anew with a later torch."
            )
    try:
        _require_checksums(path, str(path))
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        _require_harmless(str(path), names)
        with torch.serialization.safe_globals([(Record, name) for name in names]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # torch has many for bytes that are not its own
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from None


def load_tensor(data: bytes, place: str) -> torch.Tensor:
    """The one tensor that ``torch.save`` made ``data`` of; raises as `load_torch_file`, naming ``place``."""
    try:
        _require_checksums(io.BytesIO(data), place)
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # torch has many for bytes that are not its own
        raise CheckpointError(f"{place} is no tensor that can be read: {_first_line(error)}") from None
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{place} is a {type(tensor).__name__}, not a tensor.")
    return tensor


def load_dcp_metadata(data: bytes, place: str) -> Any:
    """The ``.metadata`` of torch.distributed.checkpoint as records; types of tensors are texts, such as "float32".

    Raises:
        CheckpointError: it is none, or refers to code.
    """
    try:
        return _MetadataUnpickler(io.BytesIO(data)).load()
    except CheckpointError as error:
        raise CheckpointError(f"{place} {error}") from None
    except Exception as error:  # a pickle that is cut off or made up can fail in any way
        raise CheckpointError(f"{place} cannot be read: {_first_line(error)}") from None


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the names of torch's metadata, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in ITEM_SIZES:
            return name
        if (module, name) == ("torch", "Size"):
            return _shape
        full = f"{module}.{name}"
        if (
            full.startswith("torch.distributed.checkpoint.")
            or full == "torch.serialization._get_layout"
            or HARMLESS.fullmatch(full)
        ):
            return _record_class(name)
        raise CheckpointError(_refusal([full]))


@cache
def _record_class(name: str) -> type[Record]:
    return type(name, (Record,), {})


def _shape(sizes: Any = ()) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)


def _require_checksums(file: Path | io.BytesIO, place: str) -> None:
    """Hold what is in a file of torch.save against the checksums that it has, which torch does not do."""
    with zipfile.ZipFile(file) as records:
        if (damaged := records.testzip()) is not None:
            raise CheckpointError(f"{place} is damaged: the checksum of {damaged} in it is another.")


def _require_harmless(place: str, names: list[str]) -> None:
    foreign = sorted(name for name in names if not HARMLESS.fullmatch(name))
    if foreign:
        raise CheckpointError(f"{place} {_refusal(foreign)}")


def _refusal(names: list[str]) -> str:
    return (
        f"refers to {counted(len(names), 'name')} of code that checkpoints do not need: {', '.join(names[:5])}. Reading it could "
        "run that code, so it was refused. If you trust it, load it where it was made, and save it without that."
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
