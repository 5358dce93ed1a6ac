"""A copy of tensors as they are at one step, made while training goes on to the next update.

Between two updates nothing but the user's own code may change what is copied: parameters and the optimizer's state. What a
forward pass may change (buffers) is copied before training goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from trainrun.checkpoint.parts import Part
from trainrun.checkpoint.write import Plan, Snapshot, Values

MOST_THREADS = 4
"""That copy at the same time: a few can use all of a memory's bandwidth."""


def take_snapshot(parts: Sequence[Part], values: Values) -> Snapshot:
    """Copy ``parts``, from whatever device, into one block of memory of this process."""
    plan = Plan.of(parts)
    block = torch.zeros(plan.size, dtype=torch.uint8)
    for part, target in zip(parts, targets(parts, plan, block), strict=True):
        target.copy_(part.local)
    return Snapshot(block.numpy().data, plan, values)


def targets(parts: Sequence[Part], plan: Plan, block: Tensor) -> list[Tensor]:
    """Where each part lies in a block of bytes, as a tensor of its type and shape."""
    return [
        block[slot.offset : slot.offset + slot.length].view(part.local.dtype).view(part.local.shape)
        for part, slot in zip(parts, plan.slots, strict=True)
    ]


def settled(parts: Sequence[Part], changing: Callable[[Part], bool]) -> list[Part]:
    """The parts, with copies in the place of those that are ``changing`` while training goes on."""
    return [replace(part, local=part.local.clone()) if changing(part) else part for part in parts]


class Copy:
    """The copying of parts, in the background.

    On the CPU a few threads copy. On CUDA a stream of its own does, after everything that was given to the device so far: then
    `before_update` lets the device wait, and not this process.
    """

    def __init__(self, parts: Sequence[Part], device: torch.device, *, threads: int) -> None:
        """Nothing is copied before `run`.

        Args:
            parts: to copy.
            device: that on which they are; some may be on the CPU.
            threads: that may copy at the same time.
        """
        self.parts = parts
        self._versions = [part.local._version for part in parts]
        self._threads = min(threads, MOST_THREADS)
        self._handed_over = threading.Event()
        self._device = device
        self._copied: torch.Event | None = None
        self._given = torch.accelerator.current_stream(device).record_event() if device.type == "cuda" else None

    def run(self, into: Callable[[], Sequence[Tensor]]) -> None:
        """Copy to where ``into`` says; returns when everything is there. For a thread of its own."""
        try:
            places = list(zip(into(), (part.local for part in self.parts), strict=True))
            if self._given is not None:
                self._copied = self._on_stream([pair for pair in places if pair[1].is_cuda], self._given)
                places = [pair for pair in places if not pair[1].is_cuda]
            if places:
                self._on_host(places)
        finally:
            self._handed_over.set()
        if self._copied is not None:
            self._copied.synchronize()

    def before_update(self) -> None:
        """Whatever is given to the device from now on, or done by this process, comes after the copying."""
        self._handed_over.wait()
        if self._copied is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._copied)

    def changed(self) -> list[str]:
        """Names of what was changed since this object was made: a copy of it may be a mixture."""
        names = {part.name for part, version in zip(self.parts, self._versions, strict=True) if part.local._version != version}
        return sorted(names)

    def _on_stream(self, pairs: Sequence[tuple[Tensor, Tensor]], given: torch.Event) -> torch.Event:
        stream = torch.Stream(device=self._device)
        stream.wait_event(given)
        with stream:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return stream.record_event()

    def _on_host(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        shares: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self._threads)]
        loads = [0] * self._threads
        for pair in sorted(pairs, key=lambda pair: -pair[0].nbytes):
            least = loads.index(min(loads))
            shares[least].append(pair)
            loads[least] += pair[0].nbytes
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(_copy, shares))


@torch.no_grad()
def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)  # which lets other threads run, unlike the copying of a storage
