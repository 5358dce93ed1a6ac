"""The learning rate is a function of the step: what it does at its ends and joints, whatever the settings (NUM-02)."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trainrun.config import ConfigError
from trainrun.optimizer import schedule
from trainrun.settings import OptimizerSettings

SCHEDULES = ("cosine", "wsd", "linear", "constant")


def settings_of(kind: str, warmup: int, decay: float, final: float) -> OptimizerSettings:
    own: dict[str, Any] = {"schedule": kind, "warmup_steps": warmup}
    if kind == "wsd":
        own["decay_fraction"] = decay
    if kind != "constant":
        own["final_fraction"] = final
    return OptimizerSettings(**own)


fractions = st.sampled_from([0.0, 1.0, 0.1, 1 / 3]) | st.floats(0, 1)
settings = st.builds(settings_of, st.sampled_from(SCHEDULES), st.integers(0, 60), fractions, fractions)
lengths = st.integers(1, 200)


def rates(steps: int, chosen: OptimizerSettings) -> list[float]:
    """Those of steps 1 to ``steps``."""
    return [schedule(step, steps=steps, settings=chosen) for step in range(1, steps + 1)]


@given(lengths, settings)
def test_a_rate_is_never_above_the_peak_nor_below_what_its_part_ends_at(steps: int, chosen: OptimizerSettings) -> None:
    found = rates(steps, chosen)
    warmup = chosen.warmup_steps
    lowest = 1.0 if chosen.schedule == "constant" else chosen.final_fraction
    assert all(1 / warmup <= rate <= 1 for rate in found[:warmup])
    assert all(lowest - 1e-12 <= rate <= 1 for rate in found[warmup:])


@given(lengths, settings)
def test_it_rises_to_the_peak_and_falls_from_there(steps: int, chosen: OptimizerSettings) -> None:
    found = rates(steps, chosen)
    up, down = found[: chosen.warmup_steps], found[chosen.warmup_steps :]
    assert up == [step / chosen.warmup_steps for step in range(1, len(up) + 1)]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(down))


@given(lengths, settings)
def test_it_has_no_jumps(steps: int, chosen: OptimizerSettings) -> None:
    """Between two steps the rate changes by no more than the steepest of its parts does."""
    found = rates(steps, chosen)
    decay = steps - chosen.warmup_steps
    if chosen.schedule == "wsd":
        decay = min(decay, chosen.decay_fraction * steps)
    assume(decay >= 1)
    fall = 0.0 if chosen.schedule == "constant" else (1 - chosen.final_fraction) / decay
    steepest = max(1 / max(1, chosen.warmup_steps), fall * (1.5708 if chosen.schedule == "cosine" else 1))
    assert all(abs(later - earlier) <= steepest + 1e-9 for earlier, later in pairwise(found))


@given(lengths, settings)
def test_the_last_step_is_at_the_final_fraction(steps: int, chosen: OptimizerSettings) -> None:
    assume(chosen.warmup_steps < steps and chosen.schedule != "constant")
    assume(chosen.schedule != "wsd" or chosen.decay_fraction * steps > 1e-6)
    assert schedule(steps, steps=steps, settings=chosen) == pytest.approx(chosen.final_fraction, abs=1e-9)


@given(lengths, st.integers(0, 60), fractions)
def test_wsd_decays_in_a_line_over_its_fraction_and_no_earlier(steps: int, warmup: int, fraction: float) -> None:
    chosen = settings_of("wsd", warmup, fraction, 0.0)
    found = dict(enumerate(rates(steps, chosen), start=1))
    begin = max(warmup, steps - fraction * steps)
    assert all(found[step] == pytest.approx(1, abs=1e-9) for step in found if warmup <= step <= begin and step > 0)
    falling = [found[step] for step in found if step > begin + 1e-9]
    slopes = [earlier - later for earlier, later in pairwise(falling)]
    assert all(slope == pytest.approx(1 / (steps - begin), abs=1e-9) for slope in slopes)


@pytest.mark.parametrize(
    ("chosen", "steps", "expected"),
    [
        (settings_of("wsd", 0, 0.5, 0.0), 8, [1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
        (settings_of("wsd", 2, 0.25, 0.5), 8, [0.5, 1, 1, 1, 1, 1, 0.75, 0.5]),
        (settings_of("wsd", 4, 1.0, 0.0), 8, [0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0]),  # into the warm-up: after it
        (settings_of("wsd", 0, 0.0, 0.0), 3, [1, 1, 1]),
        (settings_of("linear", 4, 0, 0.0), 8, [0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0]),
        (settings_of("linear", 0, 0, 0.2), 4, [0.8, 0.6, 0.4, 0.2]),
        (settings_of("cosine", 1, 0, 0.0), 4, [1, 0.75, 0.25, 0]),
        (settings_of("constant", 2, 0, 0), 4, [0.5, 1, 1, 1]),
        (settings_of("cosine", 10, 0, 0.5), 4, [0.1, 0.2, 0.3, 0.4]),  # a warm-up that is longer than the run
        (settings_of("cosine", 0, 0, 0.1), 1, [0.1]),
        (settings_of("wsd", 1, 1.0, 0.1), 1, [1]),
        (settings_of("constant", 0, 0, 0), 1, [1]),
    ],
)
def test_known_rates(chosen: OptimizerSettings, steps: int, expected: list[float]) -> None:
    assert rates(steps, chosen) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"schedule": "constant", "final_fraction": 0.0}, "final_fraction is 0.0, but schedule is 'constant', which has no use"),
        ({"decay_fraction": 0.5}, "decay_fraction is 0.5, but schedule is 'cosine', which has no use for it. Remove it, or set"),
        ({"momentum": 0.9}, "momentum is 0.9, but name is 'adamw', which has no use for it. Remove it, or set name to 'muon'."),
        ({"learning_rate": float("inf")}, "learning_rate is inf. Allowed: more than 0, and finite."),
        ({"decay_fraction": 1.5, "schedule": "wsd"}, "decay_fraction is 1.5. Allowed: 0 to 1."),
    ],
)
def test_what_would_be_ignored_or_cannot_be_is_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerSettings(**chosen)


def test_a_default_that_is_written_out_is_not_taken_for_a_wish() -> None:
    defaults = dataclasses.asdict(OptimizerSettings())
    for kind in SCHEDULES:
        assert OptimizerSettings(**{**defaults, "schedule": kind}).schedule == kind
