"""Which tensor of a folder's safetensors files belongs where in a transformers model, and what belongs nowhere."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.config import ConfigError
from trainrun.models.weights import SafetensorsWeights, open_safetensors
from trainrun.settings.finetune import FineTuneSettings

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

CLASSIFIER = re.compile(r"(classifier|score|pre_classifier|(\w+\.)?pooler)\.")
"""What classification puts on a model: drawn where the files are of another task."""
HEADS = re.compile(r"(lm_head|cls|classifier|score|pre_classifier|qa_outputs|(\w+\.)?pooler)\.")
"""What any task puts on a model: left unread where the task is another."""
COMPUTED = re.compile(r"(position_ids|token_type_ids|inv_freq|masked_bias|attn\.bias)$")
"""Buffers that older files hold and models compute."""

MOST_PROBLEMS = 20
"""Weights that are named; a wrong model has thousands."""

_FLOATS = {"F64", "F32", "F16", "BF16"}


def find_weights(
    model: nn.Module, folder: Path, settings: FineTuneSettings, *, prefix: str, seed: int, say: Callable[[str], None]
) -> SafetensorsWeights:
    """The source of ``model``'s parameters.

    Args:
        model: of transformers, made for ``settings.task``, without memory.
        folder: of the files.
        settings: the task, and what may be missing or unread.
        prefix: under which the model's names are asked for.
        seed: of what is drawn.
        say: told what is drawn or unread.

    Raises:
        ConfigError: weights are missing, of another shape, or in the files and not in the model, and not allowed to be.
    """
    parameters = dict(model.named_parameters())
    match = _match(model, parameters, folder)
    new = [name for name in parameters if name not in match.found]
    allowed_new = settings.new_weights, CLASSIFIER if settings.task == "classification" else None
    problems = match.quantised
    for name in _refused(new, *allowed_new):
        problems.append(
            match.misfits.get(name, f"No file in {folder} has the weights {name}. finetune.new_weights may allow it.")
        )
    for key in _refused(match.unread, settings.unused_weights, HEADS):
        problems.append(f"The files in {folder} have {key}, the model has not. finetune.unused_weights may allow it.")
    if problems:
        raise ConfigError(
            [*problems[:MOST_PROBLEMS], *([f"{len(problems) - MOST_PROBLEMS} more."] if problems[MOST_PROBLEMS:] else [])]
        )
    if new:
        say(f"Drawn anew, because no file in {folder} has them: {', '.join(new)}.")
    if match.unread:
        say(f"Not used, of the files in {folder}: {', '.join(match.unread)}.")
    deviation = float(getattr(model.config, "initializer_range", None) or 0.02)
    drawn = {prefix + name: _draw(name, parameters[name].shape, deviation, seed) for name in new}
    return SafetensorsWeights({prefix + name: place for name, place in match.found.items()}, drawn)


@dataclass
class _Match:
    """How files and model go together."""

    found: dict[str, tuple[Path, str]] = field(default_factory=dict)
    """File and key, by the model's name."""
    unread: list[str] = field(default_factory=list)
    """Keys that the model has no place for."""
    misfits: dict[str, str] = field(default_factory=dict)
    """What is wrong, by the model's name, with weights of another shape."""
    quantised: list[str] = field(default_factory=list)
    """What is wrong with weights that are no floating-point numbers."""


def _match(model: nn.Module, parameters: Mapping[str, nn.Parameter], folder: Path) -> _Match:
    match = _Match()
    aliases = _aliases(model, parameters)
    for path in weight_files(folder):
        file = open_safetensors(path)
        for key in file.keys():  # noqa: SIM118  it is no mapping
            name = _name_in_model(key, parameters, aliases, getattr(model, "base_model_prefix", ""))
            if name is None:
                match.unread += [] if COMPUTED.search(key) else [key]
                continue
            part = file.get_slice(key)
            if part.get_dtype() not in _FLOATS:
                match.quantised.append(f"{key} in {path} is of type {part.get_dtype()}: quantised weights cannot be trained.")
            if tuple(part.get_shape()) == tuple(parameters[name].shape):
                match.found[name] = (path, key)
            else:
                match.misfits[name] = f"{key} is {part.get_shape()} in {path}, {list(parameters[name].shape)} in the model."
    return match


def _refused(names: Iterable[str], beginnings: tuple[str, ...], pattern: re.Pattern[str] | None) -> list[str]:
    """Those that neither start as allowed nor match."""
    return [name for name in names if not name.startswith(beginnings) and not (pattern and pattern.match(name))]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model.

    Raises:
        ConfigError: there are none, or one that the index names is missing.
    """
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ConfigError([f"{folder} lacks {', '.join(missing)}, which {INDEX} names. Fetch the model anew."])
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise ConfigError(
        [f"{folder} has neither {SINGLE} nor {INDEX}. Weights in other formats have to be converted: save_pretrained() does."]
    )


def _aliases(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Further names of tied parameters."""
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    everything = model.named_parameters(remove_duplicate=False)
    return {name: name_of[id(parameter)] for name, parameter in everything if name not in parameters}


def _name_in_model(key: str, parameters: Mapping[str, Any], aliases: Mapping[str, str], base: str) -> str | None:
    """What the model calls a tensor of a file: files of the bare model lack its first part, old ones say gamma and beta."""
    modern = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", key))
    for name in (modern, f"{base}.{modern}", modern.removeprefix(f"{base}.")):
        if name in parameters:
            return name
        if name in aliases:
            return aliases[name]
    return None


def _draw(name: str, shape: torch.Size, deviation: float, seed: int) -> Tensor:
    """A weight that no file has, the same on every rank: matrices normal, biases zero, the scales of norms one."""
    if len(shape) < 2:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    source = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
    return torch.empty(shape).normal_(std=deviation, generator=source)
