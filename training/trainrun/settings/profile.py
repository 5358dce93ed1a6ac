"""When a run is profiled."""

from __future__ import annotations

from dataclasses import dataclass

from trainrun.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """A window of steps of which rank 0 keeps a trace, and on CUDA a memory snapshot, in the run's folder: below the checkpoint
    location, else in $TRAINRUN_STATE or the working directory, as ``profile/step-.../rank-....json.gz``."""

    start_step: int = 0
    """First step of the window; 0 profiles nothing."""
    steps: int = 3
    """Steps in the window."""

    def __post_init__(self) -> None:
        problems = []
        if self.start_step < 0:
            problems.append(f"start_step is {self.start_step}. Allowed: 0 (no profile) or more.")
        if self.steps < 1:
            problems.append(f"steps is {self.steps}. Allowed: 1 or more.")
        elif self.start_step == 0 and self.steps != ProfileSettings.steps:
            problems.append(
                f"steps is {self.steps}, but start_step is 0, which profiles nothing. Set start_step to the first step to "
                "profile, or remove steps."
            )
        if problems:
            raise ConfigError(problems)
