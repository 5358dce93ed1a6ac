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
        self._alone: list[int] = []
        self._asked: tuple[torch.Tensor, dist.Work] | None = None

    def ask(self, numbers: Sequence[int]) -> None:
        """Start to tell the others; as many numbers on each rank. `answer` hears of it."""
        if self._control is None:
            self._alone = list(numbers)
            return
        tensor = torch.tensor(numbers)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control, async_op=True)
        assert work is not None
        self._asked = (tensor, work)

    def answer(self) -> list[int]:
        """The largest of each number as of the last `ask`, the same on all ranks; empty when nothing was asked since."""
        asked, alone = self._asked, self._alone
        self._asked, self._alone = None, []
        if asked is None:
            return alone
        tensor, work = asked
        work.wait()
        found: list[int] = tensor.tolist()
        return found
