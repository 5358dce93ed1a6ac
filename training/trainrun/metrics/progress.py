"""What a run tells about itself: metric lines to files, and to people dense lines with a live bar below them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from trainrun import devices
from trainrun.metrics.bar import Bar, open_bar
from trainrun.metrics.clock import Clock
from trainrun.metrics.console import scaled, spread_of, step_line, summary_line
from trainrun.metrics.flops import ModelFlops, peak_flops
from trainrun.metrics.lines import MetricLines
from trainrun.ranks import Ranks
from trainrun.settings import TrainSettings


class Progress:
    """Rank 0 speaks, the others only keep the time. The fields are those of ``docs/metrics.md``.

    Args:
        directory: where metric lines go, or None for no files.
    """

    def __init__(self, settings: TrainSettings, ranks: Ranks, directory: Path | None) -> None:
        self.clock = Clock()
        self._settings, self._ranks = settings, ranks
        self._lines = MetricLines(directory) if directory is not None and ranks.first else None
        self._bar: Bar | None = None
        self._flops: ModelFlops | None = None
        self._peak: float | None = None

    def describe(self, flops: ModelFlops) -> None:
        """Tell what the model needs a token, from which the MFU follows."""
        name = devices.name(self._ranks.device)
        self._flops = flops
        self._peak = peak_flops(name, precision=self._settings.precision, tf32=self._settings.tf32)
        if self._peak is not None:
            self.say(
                f"MFU: {flops.convention} = {scaled(flops.per_token)}FLOP a token, over {scaled(self._peak)}FLOP/s for each "
                f"{name} in {self._settings.precision}."
            )
        elif self._ranks.device.type != "cpu":
            self.say(f"No MFU: the peak of a {name} in {self._settings.precision} is not known.")

    def begin(self, *, waited: float) -> None:
        """The first step begins.

        Args:
            waited: seconds waited for data so far, which do not count.
        """
        if self._ranks.first:
            self._bar = open_bar(self._settings.steps)
        self.clock.start(waited)

    def step(self, step: int, *, tokens: int) -> None:
        """A step was handed to the device. Asks nothing of the device."""
        self.clock.step(tokens)
        if self._bar is not None:
            seconds = self.clock.seconds_per_step
            self._bar.update(step, tokens_per_second=tokens / seconds, seconds_left=(self._settings.steps - step) * seconds)

    def is_due(self, step: int) -> bool:
        """Whether the step has a metric line."""
        return step % self._settings.log_every == 0 or step == self._settings.steps

    def report(
        self,
        step: int,
        *,
        loss: float,
        learning_rate: float,
        gradient_norm: float,
        tokens: int,
        waited: float,
        skipped: int,
        settings: TrainSettings,
    ) -> None:
        """The metric line of a step that the device has done.

        Args:
            settings: as they are by now, without "auto".
        """
        lap = self.clock.lap(waited)
        record = {
            "step": step,
            "steps": self._settings.steps,
            "loss": loss,
            "learning_rate": learning_rate,
            "gradient_norm": gradient_norm,
            "tokens": tokens,
            "tokens_per_second": lap.tokens_per_second,
            **self._mfu(lap.tokens_per_second),
            "data_wait": lap.data_wait,
            "memory_bytes": devices.peak_bytes(self._ranks.device),
            "skipped": skipped,
            "seconds_per_step": lap.seconds / lap.steps,
            "seconds_left": (self._settings.steps - step) * self.clock.seconds_per_step,
            "world": self._ranks.size,
            "strategy": settings.strategy,
            "precision": self._settings.precision,
        }
        if self._lines is not None:
            self._lines.write(record)
        if self._ranks.first:
            width = None if self._bar is None else self._bar.columns
            print(step_line(record, spread=spread_of(settings), width=width), flush=True)

    def finish(self, step: int, *, skipped: int, **details: Any) -> None:
        """All steps are done: the "finished" event and the last line."""
        seconds = max(self.clock.seconds, 1e-9)
        rate = self.clock.tokens / seconds
        record = {
            "steps_here": self.clock.steps,
            "tokens_here": self.clock.tokens,
            "seconds": seconds,
            "tokens_per_second": rate,
            **self._mfu(rate),
            "skipped": skipped,
        }
        self.event(step, "finished", **record, **details)
        self.close()
        if self._ranks.first:
            print(summary_line({"step": step, **record}), flush=True)

    def event(self, step: int, name: str, **details: Any) -> None:
        """Record that something happened at a step."""
        if self._lines is not None:
            self._lines.write({"step": step, "event": name, **details})

    def say(self, text: str) -> None:
        """One line for people, once for all ranks."""
        if self._ranks.first:
            print(text, file=sys.stderr, flush=True)

    def make_room(self) -> None:
        """Hide the bar until the next step, from a C library that is about to write."""
        if self._bar is not None:
            self._bar.hide()

    def close(self) -> None:
        """Take the bar away and close the file; harmless when done already."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._lines is not None:
            self._lines.close()

    def _mfu(self, tokens_per_second: float) -> dict[str, Any]:
        if self._flops is None or self._peak is None:
            return {"mfu": None, "mfu_convention": None}
        share = tokens_per_second * self._flops.per_token / (self._peak * self._ranks.size)
        return {"mfu": share, "mfu_convention": self._flops.convention}
