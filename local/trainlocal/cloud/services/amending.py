"""How moto is amended: a method of one of its classes is given another body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def amend(owner: type, name: str, body: Callable[..., Any]) -> None:
    """Gives a class of moto's another method of this name, or a new one."""
    setattr(owner, name, body)
