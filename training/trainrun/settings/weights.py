"""Settings of the weights that a run starts from."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainrun.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class WeightsSettings:
    """The weights of another run's checkpoint that training starts from: with a new optimizer, at step 0. Once the run has a
    checkpoint of its own, that counts."""

    checkpoint: str = ""
    """Folder of the other run (``LOCATION/RUN``), of which the newest whole checkpoint is taken, or of one of its steps
    (``LOCATION/RUN/step-000000500``); empty for none."""
    select: tuple[str, ...] = ("*",)
    """Patterns of names of its parameters and buffers, as ``blocks.*``; what fits none stays as the model was made."""
    rename: dict[str, str] = field(default_factory=dict)
    """Beginnings of names there, and what stands for them here, as ``{encoder.: backbone.}``."""
    strict: bool = True
    """Refuse selected tensors that this model lacks, and, where all are selected, a model that has more. Otherwise both are
    told, and training starts."""

    def __post_init__(self) -> None:
        problems = []
        if not self.select:
            problems.append('weights.select is empty. Allowed: one pattern or more; ["*"] is everything.')
        changed = [name for name in ("select", "rename", "strict") if getattr(self, name) != getattr(WeightsSettings, name, {})]
        if not self.checkpoint and changed:
            problems.append(f"weights.{changed[0]} is set, but weights.checkpoint, of which it speaks, is not. Set that, too.")
        if problems:
            raise ConfigError(problems)
