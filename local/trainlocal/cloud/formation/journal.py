"""The steps of an update, so that they can be taken back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainlocal.cloud.formation.stack import Resource


@dataclass(frozen=True)
class Added:
    """A resource was made, or failed to be."""

    resource: Resource


@dataclass(frozen=True)
class Changed:
    """A resource was changed in place; ``properties`` are those it had."""

    resource: Resource
    properties: dict[str, Any]


@dataclass(frozen=True)
class Replaced:
    """A resource was made in the place of another, which still exists."""

    new: Resource
    old: Resource


Step = Added | Changed | Replaced
