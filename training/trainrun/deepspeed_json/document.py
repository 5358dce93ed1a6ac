"""Reading a DeepSpeed file as DeepSpeed does, only with errors that say where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainrun.config import ConfigError


def read_document(path: str | Path) -> dict[str, Any]:
    """The mapping in a DeepSpeed JSON file.

    Raises:
        ConfigError: no such file, not JSON (comments are none), a key that is there twice, or not a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"The DeepSpeed file {path} cannot be read: {error}."]) from None
    try:
        content = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        hint = " JSON has no comments: remove them." if "//" in text or "/*" in text or "#" in text else ""
        raise ConfigError([f"The DeepSpeed file {path} is not JSON: {error}.{hint}"]) from None
    if not isinstance(content, dict):
        raise ConfigError([f"The DeepSpeed file {path} holds {type(content).__name__}. Allowed: a mapping."])
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(map(repr, twice))} is there twice, and only one could count")
    return dict(pairs)
