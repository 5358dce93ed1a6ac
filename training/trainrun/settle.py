"""The settings of a run from their layers: defaults <- a DeepSpeed file and a preset <- a file <- the RunSpec <- ``--a.b=c``."""

from __future__ import annotations

import dataclasses
import json
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainrun.config import ConfigError, merge, overrides_to_mapping
from trainrun.settings import TrainSettings
from trainrun.settings.layers import document_path, train_settings, with_documents
from trainrun.spec import RunSpec

USAGE = """Usage: {program} [settings.yaml] [--name=value ...]

Settings, of which each can be given as --name=value, and one of a section as --section.name=value:

{names}

What they mean and their defaults: docs/settings.md. An unknown one is an error that names the nearest.
Under torchrun, arguments that torchrun would take for its own come after "--": torchrun ... {program} -- --run=NAME"""


def usage(program: str) -> str:
    """What ``--help`` says."""
    names = ", ".join(each.name for each in dataclasses.fields(TrainSettings))
    return USAGE.format(program=program, names=textwrap.fill(names, 100, initial_indent="  ", subsequent_indent="  "))


def settle(path: str | Path | None, arguments: Sequence[str], *, defaults: Mapping[str, Any] | None = None) -> TrainSettings:
    """Lay the layers over one another.

    Args:
        path: a YAML or JSON file with fields of `TrainSettings`, or None.
        arguments: ``--a.b=c``; a first argument without dashes is such a file as well.
        defaults: what a script has instead of the defaults of `TrainSettings`.

    Raises:
        ConfigError: whatever is wrong with any of them, naming the nearest right thing.
    """
    files = [path] if path else []
    arguments = [argument for argument in arguments if argument != "--"]  # which torchrun hands on after a settings file
    if arguments and not arguments[0].startswith("-"):
        files.append(arguments.pop(0))
    layers = [(str(file), read_mapping(Path(file)), Path(file).parent) for file in files]
    if os.environ.get("TRAINRUN_SPEC"):
        layers.append(("the run specification", _of_spec(Path(os.environ["TRAINRUN_SPEC"])), Path()))
    layers.append(("the command line", overrides_to_mapping(arguments), Path()))
    mapping: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, given, folder in layers:
        layer = with_documents(given, folder=folder)
        mapping = merge(mapping, layer)
        origins.update(dict.fromkeys(_dotted(layer), name))
        if document := document_path(given, folder=folder):
            origins.update(dict.fromkeys(_dotted({"deepspeed": layer["deepspeed"]}), str(document)))
    return train_settings(
        mapping,
        source=", ".join(name for name, given, _ in layers if given) or "the settings",
        origins=origins,
        ranks=int(os.environ.get("WORLD_SIZE", "1")),
        defaults=defaults,
    )


def _dotted(layer: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The dotted names of the settings in a layer, those of sections among them."""
    for name, value in layer.items():
        yield path + name
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{path}{name}.")


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML (``.yaml``, ``.yml``) or JSON file that holds one mapping.

    Raises:
        ConfigError: no such file, not YAML or JSON, or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"Could not read the settings file {path}: {error.strerror}."]) from None
    try:
        content = json.loads(text) if path.suffix == ".json" else _read_yaml(text, path)
    except ValueError as error:
        raise ConfigError([f"{path} cannot be read: {error}"]) from None
    if not isinstance(content, dict):
        raise ConfigError([f"{path} holds {type(content).__name__}. Allowed: a mapping of settings."])
    return content


def _read_yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            [f"{path} needs PyYAML, which this Python lacks. Install it (pip install pyyaml) or write JSON."]
        ) from None
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _of_spec(path: Path) -> dict[str, Any]:
    spec = RunSpec.from_json(path.read_text(encoding="utf-8"))
    given = merge({"checkpoint": {"stop_seconds": spec.timeouts.stop_grace}}, spec.job.configuration)
    return merge(given, {"run": spec.run, "checkpoint": {"location": spec.storage.location}})
