"""Stop requests: a signal or a file seen by one rank becomes a decision of all ranks at the same step."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from trainrun.ranks import Ranks

EXIT_CODE = 75
"""EX_TEMPFAIL: asked to stop, not failed. 0 would tell torchrun that the whole job is done."""


class StopFlag:
    """Whether someone asked this run to stop: by SIGTERM to any rank, or by the file ``$TRAINRUN_STATE/stop``."""

    def __init__(self, ranks: Ranks, state_directory: Path | None) -> None:
        self._ranks = ranks
        self._file = state_directory / "stop" if state_directory else None
        self._signalled = False
        self._asking: tuple[torch.Tensor, dist.Work] | None = None
        signal.signal(signal.SIGTERM, self._on_signal)

    def ask(self) -> None:
        """Start to tell the others, in the background of the step; `agreed` hears the answer."""
        if self._ranks.control is not None:
            flag = torch.tensor([int(self._seen_here())])
            work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._ranks.control, async_op=True)
            assert work is not None
            self._asking = (flag, work)

    def agreed(self) -> bool:
        """Whether all ranks know, as of the last `ask`, that one of them was asked to stop."""
        if self._ranks.control is None:
            return self._seen_here()
        if self._asking is None:
            return False
        flag, work = self._asking
        self._asking = None
        work.wait()
        return bool(flag.item())

    def _seen_here(self) -> bool:
        return self._signalled or (self._file is not None and os.path.exists(self._file))  # noqa: PTH110 - once a step: a third of the cost

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
