"""Where a model's weights come from when it was made without memory, on the meta device.

A strategy that shards gives memory to its shards alone and reads only what belongs there. The rule for all: what is on
the meta device is read, everything else (small buffers, a model made in the ordinary way) is taken as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from trainrun.config import ConfigError

Slices = tuple[slice, ...]


class Weights(Protocol):
    """A source of the tensors of one model."""

    def read(self, name: str, slices: Slices = ()) -> Tensor:
        """A tensor, or the part of it that ``slices`` (of step 1, one for each of its first dimensions) cuts out.

        Args:
            name: of a parameter or buffer, as in ``named_parameters()`` and ``named_buffers()`` of the model as it was made.

        Returns:
            On the CPU, fp32 where the tensor is of a floating type.
        """
        ...


class InitialWeights:
    """The weights of a model that can tell each by name before the first step (see `trainrun.models.gpt.GPT.initial`).

    The last tensor is kept, for whoever reads it in several parts.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._last = ("", torch.empty(0))

    def read(self, name: str, slices: Slices = ()) -> Tensor:
        if self._last[0] != name:
            self._last = (name, self._model.initial(name))
        return self._last[1][slices] if slices else self._last[1]


class SafetensorsWeights:
    """Tensors of safetensors files, each read by the part that is wanted; what is not there comes from ``otherwise``.

    Args:
        keys: for each tensor of the model its file and its name in it.
        otherwise: by name, what is in no file; whole tensors.
    """

    def __init__(self, keys: Mapping[str, tuple[Path, str]], otherwise: Mapping[str, Tensor] | None = None) -> None:
        self._keys, self._otherwise = keys, otherwise or {}
        self._files: dict[Path, Any] = {}

    def read(self, name: str, slices: Slices = ()) -> Tensor:
        if name in self._otherwise:
            return self._otherwise[name][slices] if slices else self._otherwise[name]
        path, key = self._keys[name]
        if path not in self._files:
            self._files[path] = open_safetensors(path)
        file = self._files[path]
        read: Tensor = file.get_slice(key)[slices] if slices else file.get_tensor(key)
        return read.float() if read.is_floating_point() else read


def open_safetensors(path: Path) -> Any:
    """The file, mapped: its ``keys()``, ``get_tensor(key)`` and ``get_slice(key)``.

    Raises:
        ConfigError: safetensors is not installed, or the file is not whole.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigError([f"{path} needs safetensors: pip install safetensors."]) from None
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError([f"{path} cannot be read as safetensors ({error}). Fetch it anew."]) from None


@contextlib.contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Models made in this context have their parameters on the meta device, and their buffers as always.

    For models of others, whose buffers are computed when they are made and found in no file.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta:  # the same object again, so that tied weights stay tied
            return parameter
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # torch's hint forgets the result
    try:
        yield
    finally:
        hook.remove()


def on_meta(model: nn.Module) -> bool:
    """Whether any part of the model has no memory yet."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def weights_of(model: nn.Module, given: Weights | None) -> Weights:
    """The source for a model: what was given, or the model's own ``initial``.

    Raises:
        ConfigError: there is neither.
    """
    if given is not None:
        return given
    if callable(getattr(model, "initial", None)):
        return InitialWeights(model)
    raise ConfigError(
        [
            f"The model ({type(model).__name__}) is on the meta device and has no weights. Give run.prepare(..., weights=...) a "
            "source, or the model a method initial(name) that returns the tensor it starts with; or make it on the CPU."
        ]
    )


def give_memory(model: nn.Module, weights: Weights, device: torch.device) -> None:
    """Put what is on the meta device onto ``device``, whole, with its weights. Parameters stay the same objects."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                whole = nn.Parameter(weights.read(name).to(device, copy=True), requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, whole)  # type: ignore[no-untyped-call]
    give_buffers_memory(model, weights, device)


def give_buffers_memory(model: nn.Module, weights: Weights, device: torch.device) -> None:
    """Put the buffers that are on the meta device onto ``device``, with their values."""
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, weights.read(name).to(device, copy=True))
