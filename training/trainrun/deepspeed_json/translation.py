"""What a DeepSpeed file says, in trainrun's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainrun.deepspeed_json.batch import BatchSizes


@dataclass(frozen=True)
class Said:
    """A setting that the file gives."""

    value: Any
    path: str
    """The key that gives it."""


@dataclass
class Translation:
    """A file in trainrun's words, as far as it can be said without the model and the number of ranks."""

    problems: list[str] = field(default_factory=list)
    """One sentence for each thing that is wrong or not supported."""
    said: dict[str, Said] = field(default_factory=dict)
    """By the dotted name of trainrun's setting."""
    implied: dict[str, Any] = field(default_factory=dict)
    """Values that follow from DeepSpeed's own defaults; a setting of the user's comes before them."""
    tuning: dict[str, Any] = field(default_factory=dict)
    """What only DeepSpeed's engine understands, with its "auto" values."""
    automatic: list[str] = field(default_factory=list)
    """Dotted names of the settings that the file leaves to trainrun by "auto"; sizes of a batch are in ``batch``."""
    notes: list[str] = field(default_factory=list)
    """What has another effect here than in DeepSpeed, as sentences."""
    batch: BatchSizes = field(default_factory=BatchSizes)
    stage: int | None = None
    """Of ZeRO; None where the file does not say."""

    def say(self, setting: str, value: Any, path: str) -> None:
        """Record that the file gives a setting; two keys that give it differently are a problem."""
        before = self.said.get(setting)
        if before is not None and before.value != value:
            self.problems.append(
                f"{before.path} and {path} disagree: {setting} would be {before.value!r} and {value!r}. Change one of them."
            )
            return
        self.said[setting] = Said(value, path)

    def leave(self, setting: str) -> None:
        """Record that the file leaves a setting to trainrun, so that DeepSpeed's own default does not count."""
        self.implied.pop(setting, None)
        if setting not in self.automatic:
            self.automatic.append(setting)

    def tune(self, values: Mapping[str, Any], *path: str) -> None:
        """Hand keys to the engine, below a path of its configuration."""
        place = self.tuning
        for name in path:
            place = place.setdefault(name, {})
        place.update({name: value for name, value in values.items() if value is not None})
