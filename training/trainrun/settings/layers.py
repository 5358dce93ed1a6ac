"""From what a user gives to whole settings: presets and DeepSpeed files lie between it and the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainrun.config import from_mapping, merge
from trainrun.deepspeed_json import read_document, with_deepspeed
from trainrun.settings.presets import with_preset
from trainrun.settings.train import TrainSettings


def train_settings(
    given: Mapping[str, Any],
    *,
    source: str,
    origins: Mapping[str, str] | None = None,
    ranks: int | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> TrainSettings:
    """The settings of a run.

    Args:
        given: fields of `TrainSettings` that differ from their defaults. A ``deepspeed`` path has been read (`with_documents`).
        source: what they were read from, for messages.
        origins: by dotted name, where a setting (or all of a section) is given, if not in ``source``.
        ranks: how many there are; None at synth, where the rules look at batch sizes that depend on it.
        defaults: fields of `TrainSettings` that a script has instead of their defaults, under everything else.

    Raises:
        ConfigError: everything that is wrong, together.
    """
    lowest = from_mapping(TrainSettings, defaults or {}, source="the script's defaults")
    layered = with_deepspeed(with_preset(given), origins={"": source, **(origins or {})}, ranks=ranks, defaults=lowest)
    return from_mapping(TrainSettings, merge(defaults or {}, layered), source=source)


def with_documents(given: Mapping[str, Any], *, folder: Path) -> dict[str, Any]:
    """Settings whose ``deepspeed`` path is replaced by what the file holds, so that they mean the same anywhere.

    Args:
        folder: what a relative path is relative to.

    Raises:
        ConfigError: the file cannot be read or is not JSON.
    """
    path = document_path(given, folder=folder)
    return dict(given) if path is None else {**given, "deepspeed": read_document(path)}


def document_path(given: Mapping[str, Any], *, folder: Path) -> Path | None:
    """The DeepSpeed file that settings name, None where they name none."""
    path = given.get("deepspeed")
    return folder / path if isinstance(path, str) and path else None
