"""Files that others may read at any moment."""

from __future__ import annotations

from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Write a file so that a reader sees all of it, or what was there before."""
    new = file.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)
