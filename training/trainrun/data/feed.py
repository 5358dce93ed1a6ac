"""Micro-batches from a dataset whose order is a function of the position: shares, and reading ahead in a thread."""

from __future__ import annotations

import abc
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainrun import devices
from trainrun.data.batch import Batch
from trainrun.ranks import Ranks

Positions = np.ndarray[Any, np.dtype[np.uint64]]
Step = list[tuple[Tensor, ...]]
"""The micro-batches of one step, in CPU memory."""


SLOW_SECONDS = 0.0005
"""Reading a step's share takes at least so long where a thread is worth it: to hand a step over costs up to as much, on a
machine whose cores are all busy."""
ENOUGH_SLOW = 4
"""By so many slow reads must those that were quick be outnumbered, so that a hiccup does not count."""


class Feed(abc.ABC):
    """This rank's share of every batch, in micro-batches. The state is one position, which counts only what was trained on.

    Where reading takes its time (a disk that is not cached, long sequences), a thread reads the next step's share while the
    model computes on the present one. What it has read ahead is only a copy: it is thrown away when the position turns out to
    be another.

    Args:
        batch: sequences per step over all ranks.
        share: of them, those of this rank: ``batch / ranks.data_size``.
        micro_batch: most sequences in one micro-batch.

    Attributes:
        position: sequences consumed so far, over all ranks.
        share: see above.
        waited: seconds that the loop waited for micro-batches, in all.
    """

    def __init__(self, *, batch: int, share: int, micro_batch: int, ranks: Ranks) -> None:
        self.position = 0
        self.share = share
        self.waited = 0.0
        self._batch, self._micro_batch, self._ranks = batch, micro_batch, ranks
        self._given = 0
        self._slow_reads = 0
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, int, Future[Step]] | None = None

    @property
    @abc.abstractmethod
    def valid_tokens(self) -> int:
        """Valid targets of the present step over all ranks."""

    @abc.abstractmethod
    def _read(self, positions: Positions) -> tuple[Tensor, ...]:
        """What stands at these positions, as CPU tensors. Called in any thread."""

    @abc.abstractmethod
    def _as_batch(self, *tensors: Tensor) -> Batch:
        """What `_read` returned, which is on the rank's device by now, as a batch."""

    @property
    def complete(self) -> bool:
        """Whether all micro-batches of the present step were given out, the last of them included."""
        return self._given == self.share

    @property
    def given(self) -> int:
        """Micro-batches of the present step that were given out."""
        return -(-self._given // self._micro_batch)

    def micro_batches(self) -> Iterator[Batch]:
        """This rank's share of the present step. `trainrun.run.Run.step` moves on to the next."""
        self._given = 0
        asked = time.perf_counter()
        step = self._take(self.position)
        if self._slow_reads >= ENOUGH_SLOW:
            self._read_ahead(self.position + self._batch)
        for number, tensors in enumerate(step, start=1):
            batch = self._on_device(tensors)
            self._given = min(number * self._micro_batch, self.share)
            self.waited += time.perf_counter() - asked
            yield batch
            asked = time.perf_counter()

    def advance(self) -> None:
        """Move on to the next step."""
        self.position += self._batch
        self._given = 0

    def sample(self, sequences: int) -> Batch:
        """So many sequences of the present step, without moving on: to measure with.

        Args:
            sequences: at most `share`.
        """
        assert sequences <= self.share
        return self._on_device(self._read(self._positions(self.position, 0, sequences)))

    def set_micro_batch(self, sequences: int) -> None:
        """Change the most sequences in one micro-batch, between two steps."""
        self._micro_batch = sequences

    def _positions(self, position: int, start: int, stop: int) -> Positions:
        first = position + self._ranks.data_rank * self.share
        return np.arange(first + start, first + stop, dtype=np.uint64)

    def _take(self, position: int) -> Step:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[:2] == (position, self._micro_batch):
            return ahead[2].result()
        began = time.perf_counter()
        step = self._read_step(position, self._micro_batch)
        slow = time.perf_counter() - began >= SLOW_SECONDS
        self._slow_reads = max(0, self._slow_reads + (1 if slow else -1))
        return step

    def _read_ahead(self, position: int) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._ahead = position, self._micro_batch, self._thread.submit(self._read_pinned, position, self._micro_batch)

    def _read_pinned(self, position: int, micro_batch: int) -> Step:
        step = self._read_step(position, micro_batch)
        if self._ranks.device.type != "cuda":
            return step
        torch.accelerator.set_device_index(self._ranks.device.index)  # else this thread would open the first GPU
        return [tuple(tensor.pin_memory() for tensor in tensors) for tensors in step]

    def _read_step(self, position: int, micro_batch: int) -> Step:
        """This rank's share of the step at ``position``, in micro-batches. Called in any thread."""
        starts = range(0, self.share, micro_batch)
        return [self._read(self._positions(position, start, min(start + micro_batch, self.share))) for start in starts]

    def _on_device(self, tensors: tuple[Tensor, ...]) -> Batch:
        return self._as_batch(*(devices.send(tensor, self._ranks.device) for tensor in tensors))
