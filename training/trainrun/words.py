"""Numbers in sentences. Standard library only."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """ "1 rank", "8 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
