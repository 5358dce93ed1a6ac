"""What all ranks have to know at the same step, without any of them waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from trainrun.ranks import Ranks


class Agreement:
    """A few whole numbers of each rank, of which all ranks hear the largest: one all-reduce a step, in its background."""

    def __init__(self, ranks: Ranks) -> None:
        self._control = ranks.control
        self._numbers: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def ask(self, numbers: Sequence[int]) -> None:
        """Start to tell the others; as many numbers on each rank. `answer` hears of it."""
        self._numbers = torch.tensor(numbers)
        if self._control is not None:
            self._work = dist.all_reduce(self._numbers, op=dist.ReduceOp.MAX, group=self._control, async_op=True)

    def answer(self) -> list[int]:
        """The largest of each number as of the last `ask`, the same on all ranks; empty when nothing was asked since."""
        numbers, work = self._numbers, self._work
        self._numbers = self._work = None
        if work is not None:
            work.wait()
        found: list[int] = [] if numbers is None else numbers.tolist()
        return found
