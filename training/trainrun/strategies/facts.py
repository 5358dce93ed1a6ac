"""What of a model decides how it is spread over the ranks: sizes only, so that it may be on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainrun.config import ConfigError
from trainrun.counts import FAMILIES, Shape, shape_of_config, shape_of_settings
from trainrun.settings import ModelSettings
from trainrun.strategies.units import units


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a model."""

    parameters: int
    largest_unit: int
    """Parameters of the largest repeated layer."""
    outside: int
    """Parameters of no repeated layer."""
    shape: Shape | None
    """For activations; None when the model does not tell."""


def describe(model: nn.Module) -> Model:
    """What of a module decides; it may be on the meta device."""
    layers = [count(unit) for unit in units(model)]
    parameters = count(model)
    return Model(
        parameters=parameters,
        largest_unit=max(layers, default=parameters),
        outside=parameters - sum(layers) if layers else 0,
        shape=shape_of_model(model),
    )


def shape_of_model(model: nn.Module) -> Shape | None:
    """The shape of the bundled GPT, or of a transformers model of a known kind; None for others."""
    own = getattr(model, "settings", None)
    if isinstance(own, ModelSettings):
        return shape_of_settings(own, vocabulary=next(model.parameters()).shape[0])
    config = _configuration(model)
    if config is None or config.get("model_type") not in FAMILIES:
        return None
    try:
        return shape_of_config(config)
    except ConfigError:
        return None


def hidden_size_of(model: nn.Module) -> int | None:
    """The width of a model's residual stream, where it tells one: for what DeepSpeed files leave to "auto"."""
    own = getattr(model, "settings", None)
    if isinstance(own, ModelSettings):
        return own.width
    config = _configuration(model) or {}
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        for name in ("hidden_size", "n_embd", "d_model", "dim"):
            if isinstance(place.get(name), int):
                return int(place[name])
        if sizes := place.get("hidden_sizes"):
            return int(max(sizes))
    return None


def _configuration(model: nn.Module) -> Mapping[str, Any] | None:
    config = getattr(model, "config", None)
    to_dict = getattr(config, "to_dict", None)
    if callable(to_dict):
        return dict(to_dict())
    return config if isinstance(config, Mapping) else getattr(config, "__dict__", None)


def count(module: nn.Module) -> int:
    """Parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())
