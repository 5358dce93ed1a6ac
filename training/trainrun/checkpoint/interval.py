"""How many steps lie between two saves: as the settings say, or so that saving and failing cost least together.

Whoever saves often loses time by saving; whoever saves seldom loses, with each failure, the work since the last save. With
a loss of c seconds per save and a failure every M seconds, the sum is least where saves are sqrt(2 c M) seconds apart (J. W.
Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974, 530-531; J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, 303-312, which agrees where c is much less
than M, as it is here). What a restart costs does not move that place. c is what a save takes from training, not how long the
save takes beside it: it is measured.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from trainrun.settings.checkpoint import CheckpointSettings
from trainrun.words import counted

FIRST_STEPS = 10
"""With "auto", the first save comes so many steps after a start, for there has to be one to measure. It shows early that saves
work, and a restart that has just cost something is not lost again."""

SECOND_STEPS = 100
"""The same between the first save and the second, if nothing is measured by then: the first has failed, or is not done."""

NOTICEABLE = 1.25
"""The interval moves when the best one is so many times as long, or as short: measurements are never twice the same."""

LEAST_LOSS_SECONDS = 1e-3
"""What cannot be told from nothing counts as this much, for the store and the disks pay for a save too."""

DAY_SECONDS = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What was measured, in seconds."""

    step: float
    """Of a step beside which nothing is saved."""
    lost: float
    """By which all steps beside one save are longer together, the step that waited for its snapshot included."""
    save: float
    """From a snapshot until its commit."""


def failure_seconds(*, nodes: int, failures_per_node_day: float) -> float:
    """Mean time between failures of a run: any node's failure is the run's."""
    return DAY_SECONDS / (nodes * failures_per_node_day)


def best_steps(cost: Cost, *, failure_seconds: float) -> int:
    """Steps between two saves: Young's interval, but never so few that a save would not be done before the next.

    Args:
        cost: what was measured.
        failure_seconds: mean time between failures.
    """
    young = math.sqrt(2 * max(cost.lost, LEAST_LOSS_SECONDS) * failure_seconds)
    return max(1, round(young / cost.step), math.ceil(cost.save / cost.step))


class SaveCosts:
    """Measures what saves take from training. A step lasts from the end of the one before it to its own end."""

    def __init__(self) -> None:
        self._steps = 0
        self._quiet: deque[float] = deque(maxlen=50)
        self._beside: list[float] = []
        self._lost: deque[float] = deque(maxlen=5)
        self._save: deque[float] = deque(maxlen=5)

    def step(self, seconds: float, *, saving: bool) -> None:
        """A step is done. ``saving`` tells whether a save was begun or under way in it."""
        self._steps += 1
        if self._steps == 1:
            return  # it pays for what comes once
        if saving:
            self._beside.append(seconds)
        else:
            self._quiet.append(seconds)

    def failed(self) -> None:
        """The save under way has failed: what it took says nothing of those that do not."""
        self._beside = []

    def committed(self, seconds: float) -> Cost | None:
        """The save under way is committed, so many seconds after its snapshot was begun.

        Returns:
            The cost of the last few saves, by their medians (of two the less, for the first one starts a process too); None while
            no step without a save is known.
        """
        beside, self._beside = self._beside, []
        if not self._quiet:
            return None
        step = max(statistics.median(self._quiet), 1e-9)
        self._lost.append(max(0.0, sum(beside) - len(beside) * step))
        self._save.append(seconds)
        return Cost(step=step, lost=statistics.median_low(self._lost), save=statistics.median_low(self._save))


class Interval:
    """Which steps are saved. With "auto" rank 0 proposes the interval, and all ranks adopt it at the same step."""

    def __init__(self, settings: CheckpointSettings, *, nodes: int) -> None:
        self._settings, self._nodes = settings, nodes
        self._last = 0
        self._adopted, self._steps = 0, FIRST_STEPS
        self.proposed = 0
        """What rank 0 proposes; 0 while nothing is measured."""

    def go_on_from(self, step: int) -> None:
        """``step`` is where this process begins."""
        self._last = step

    def begin(self, step: int) -> None:
        """``step`` is saved."""
        self._last = step
        self._steps = self._adopted or SECOND_STEPS

    def due(self, step: int, *, under_way: bool) -> bool:
        """Whether ``step`` is to be saved; the same on all ranks.

        Args:
            step: the present one.
            under_way: whether a save is. "auto" never has training wait for it, and begins the next when it is done.
        """
        if self._settings.every_steps != "auto":
            return step % self._settings.every_steps == 0
        return not under_way and step - self._last >= self._steps

    def adopt(self, steps: int) -> None:
        """What rank 0 proposed, as all ranks have heard it by this step; 0 is none."""
        if steps:
            self._adopted = self._steps = steps

    def propose(self, cost: Cost) -> str | None:
        """Look at what was measured: what to tell people when the interval is chosen or moves, None otherwise."""
        if self._settings.every_steps != "auto":
            return None
        mean = failure_seconds(nodes=self._nodes, failures_per_node_day=self._settings.failures_per_node_day)
        best = best_steps(cost, failure_seconds=mean)
        if self.proposed and self.proposed / NOTICEABLE < best < self.proposed * NOTICEABLE:
            return None
        before, self.proposed = self.proposed, best
        return (
            f"Saving every {counted(best, 'step')} ({_duration(best * cost.step)}){f' instead of {before}' if before else ''}: a "
            f"save costs {_duration(cost.lost)} of training and is done after {_duration(cost.save)}, and with "
            f"{self._settings.failures_per_node_day:g} failures per node and day (checkpoint.failures_per_node_day) "
            f"{counted(self._nodes, 'node')} fail{'s' if self._nodes == 1 else ''} every {_duration(mean)}."
        )


def _duration(seconds: float) -> str:
    """ "0.02 s", "4.1 s", "35 min", "2.5 h", "12 days"."""
    for unit, size, largest in (("s", 1.0, 120.0), ("min", 60.0, 120.0), ("h", 3600.0, 72.0)):
        if seconds < largest * size:
            return f"{seconds / size:.2g} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds / DAY_SECONDS:.0f} days"
