"""How long steps take, as the host sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Lap:
    """What happened since the last metric line."""

    steps: int
    seconds: float
    tokens: int
    waited: float
    """Of the seconds, those spent waiting for data."""

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.tokens / self.seconds

    @property
    def data_wait(self) -> float:
        """Share of the time that this rank waited for data, 0 to 1."""
        return min(1.0, self.waited / self.seconds)


class Clock:
    """Counts steps and tokens of this process, and the time they took.

    Attributes:
        steps: done in this process.
        tokens: trained on in this process, over all ranks.
        seconds_per_step: averaged so that the last few steps count most.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.seconds_per_step = 0.0
        self._waited_before = 0.0
        self._lap_steps = self._lap_tokens = 0
        self._begun = self._last = self._lap_began = 0.0

    def start(self, waited: float = 0.0) -> None:
        """From here on time counts.

        Args:
            waited: seconds waited for data so far, which do not count.
        """
        self._begun = self._last = self._lap_began = time.perf_counter()
        self._waited_before = waited

    def step(self, tokens: int) -> None:
        """A step was handed to the device."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        # the first step pays for what comes once, so the second starts the average anew
        weight = 1.0 if self.steps < 2 else 0.2
        self.seconds_per_step += weight * (seconds - self.seconds_per_step)
        self.steps += 1
        self.tokens += tokens

    def lap(self, waited: float) -> Lap:
        """What happened since the last lap; to be asked when the device has done all of it, else the time is too short.

        Args:
            waited: seconds waited for data in all.
        """
        now = time.perf_counter()
        lap = Lap(
            steps=self.steps - self._lap_steps,
            seconds=max(now - self._lap_began, 1e-9),
            tokens=self.tokens - self._lap_tokens,
            waited=waited - self._waited_before,
        )
        self._lap_began, self._lap_steps, self._lap_tokens, self._waited_before = now, self.steps, self.tokens, waited
        return lap

    @property
    def seconds(self) -> float:
        """Since `start`."""
        return time.perf_counter() - self._begun
