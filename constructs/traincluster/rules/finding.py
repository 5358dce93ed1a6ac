"""What a rule says when it finds something."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "info"]
"""An error stops the synth. A warning can be acknowledged by name with a reason. An info only tells."""


@dataclass(frozen=True)
class Finding:
    """One thing that a rule found in one configuration."""

    level: Level
    rule: str
    """Name of the rule, such as "efa-needs-private-subnet"."""
    message: str
    """What is wrong, with the values given, as sentences."""
    fix: str
    """What to change, as sentences."""

    def __str__(self) -> str:
        return f"{self.message} {self.fix} [{self.rule}]"
