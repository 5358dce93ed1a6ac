"""The last save of a run that was asked to stop: whether one fits into the time that is left, and what is done in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trainrun.checkpoint.saving import Saver
from trainrun.deadline import EXIT_SECONDS, LastSave, last_save
from trainrun.errors import CheckpointError
from trainrun.memory import readable_size
from trainrun.ranks import Ranks

Begin = Callable[[float], None]


def save_before(deadline: float, saver: Saver, ranks: Ranks, *, step: int, begin: Begin) -> tuple[LastSave, str]:
    """Save what fits before ``deadline``: the save under way, then the present step. Collective.

    Args:
        deadline: the `time.monotonic` at which the processes are killed, as the saver knows too.
        saver: the run's.
        ranks: all of them; rank 0 decides.
        step: the present one.
        begin: starts to save the present step; it has so many seconds.

    Returns:
        What was tried, and what there is to say when the present step is not saved; empty when it is.
    """
    left, seconds = deadline - time.monotonic(), saver.seconds
    under_way = None if saver.step in (None, step) else saver.seconds_under_way
    mine = last_save(left=left, seconds=seconds, under_way=under_way)
    plan = LastSave(**ranks.from_first({"finish": mine.finish, "save": mine.save}))
    try:
        if plan.finish or saver.step == step:
            saver.wait()
        needed = 0.0
        while plan.save and saver.saved_step != step and (time_left := ranks.from_first(_time_left(deadline))) > needed:
            begin(time_left)
            saver.wait()
            needed = time_left / 2  # for another try; who was too slow once is too slow again
    except CheckpointError:
        pass  # it was told, and who is asked to stop ends as one who was
    if saver.saved_step == step:
        return plan, ""
    if plan.save:
        why = f"could not be saved in the {left:.0f} s that were left"
    elif seconds is None:
        why = f"is not saved: {left:.0f} s were left"
    else:
        why = (
            f"is not saved: {left:.0f} s were left, of which {EXIT_SECONDS:g} s are for the end of the process, and a save takes "
            f"about {seconds:.2g} s"
        )
    there = f"A resume goes on from step {saver.saved_step}" if saver.saved_step >= 0 else "There is no checkpoint to resume from"
    if saver.step is not None:
        there += f", or from step {saver.step}, if its save, which is under way, still ends in time"
    return plan, f"WARNING: Step {step} {why}. {there}."


def _time_left(deadline: float) -> float:
    return max(0.0, deadline - EXIT_SECONDS - time.monotonic())


class Promise:
    """Tells people whether the last save will fit into ``checkpoint.stop_seconds``: before training, and as measured."""

    def __init__(self, stop_seconds: float) -> None:
        self._stop_seconds = stop_seconds
        self._fits: bool | None = None

    def at_start(self, size: int) -> str:
        """What a save of so many bytes would need."""
        needed = size / max(1.0, self._stop_seconds - EXIT_SECONDS)
        return (
            f"A checkpoint has {readable_size(size)}. When asked to stop, the last one has {self._stop_seconds:g} s "
            f"(checkpoint.stop_seconds): {readable_size(needed)}/s would be enough."
        )

    def measured(self, seconds: float, size: int) -> tuple[str, dict[str, Any]] | None:
        """What there is to say, and to record, now that a save has taken so long; None when that is no news."""
        fits = last_save(left=self._stop_seconds, seconds=seconds, under_way=None).save
        if fits is self._fits:
            return None
        self._fits = fits
        took = f"a save of {readable_size(size)} takes {seconds:.2g} s"
        has = f"the last one has {self._stop_seconds:g} s (checkpoint.stop_seconds)"
        if fits:
            text = f"When asked to stop, {has}, and {took}: it fits."
        else:
            text = (
                f"WARNING: {took}, and {has}, of which {EXIT_SECONDS:g} s are for the end of the process: it does not fit, and "
                "what is trained since the last save will be lost. Raise timeouts.stop_grace (a spot notice gives 120 s), or "
                "save more often."
            )
        return text, {"fits": fits, "seconds": round(seconds, 3), "stop_seconds": self._stop_seconds}
