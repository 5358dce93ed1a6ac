"""The learning rate as a function of the step alone.

A schedule that is stepped goes wrong when it is stepped once per process or is not restored; a function cannot.
"""

from __future__ import annotations

import math

from trainrun.settings import OptimizerSettings


def schedule(step: int, *, steps: int, settings: OptimizerSettings) -> float:
    """The fraction of the peak learning rate at an optimizer step.

    It rises linearly to 1 at step ``settings.warmup_steps`` and stays there until the decay begins: at the warm-up's end
    ("cosine", "linear"), ``settings.decay_fraction`` of the run before its end but not within the warm-up ("wsd"), or never
    ("constant"). From there it falls to ``settings.final_fraction`` at the last step, along a half cosine ("cosine") or a
    line. A warm-up that is longer than the run is cut off by its end.

    Args:
        step: 1 to ``steps``.
        steps: optimizer steps of the whole run.
    """
    if step <= settings.warmup_steps:
        return step / settings.warmup_steps
    begin = _decay_begins(steps, settings)
    if step <= begin:
        return 1.0
    progress = (step - begin) / (steps - begin)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if settings.schedule == "cosine" else 1 - progress
    return settings.final_fraction + (1 - settings.final_fraction) * left


def _decay_begins(steps: int, settings: OptimizerSettings) -> float:
    """The last step at the peak."""
    if settings.schedule == "constant":
        return steps
    if settings.schedule == "wsd":
        return max(settings.warmup_steps, steps * (1 - settings.decay_fraction))
    return settings.warmup_steps
