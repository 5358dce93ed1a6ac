"""How many sequences fit into memory: measured before training with 1, 2, 4, ..., the same on all ranks.

Nothing is tried that might not fit: twice the sequences never take more than twice the memory, so the number is doubled only
while that fits for certain. Beyond, memory grows by the same amount with every sequence.
A run that was measured is the same, bit for bit, as one that was told the number.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainrun import devices
from trainrun.config import ConfigError
from trainrun.data.batch import IGNORED, Batch
from trainrun.data.stream import Stream
from trainrun.metrics.console import sized
from trainrun.ranks import Ranks
from trainrun.settings import TrainSettings
from trainrun.strategies.base import Strategy

PART_OF_FREE = 0.85
"""Part of the free memory that is planned with. The rest is for what no tensor shows: allocators round up and fragment, by
about an eighth in torchtitan's published runs (`trainrun.memory.RESERVED`)."""

STATE_BYTES = 8
"""Optimizer state per parameter that does not exist before the first step: AdamW's two moments in fp32."""


@dataclass(frozen=True)
class Measured:
    """What one rank found, in bytes."""

    sequences: int
    """The most that were tried."""
    taken: int
    """What a forward and backward pass over them took at most, beside what stays between the passes."""
    per_sequence: int
    """What each further sequence takes."""
    budget: int
    """What may be used for a pass."""

    def need(self, sequences: int) -> int:
        """What a pass over so many sequences takes; too little for fewer than half of those that were tried."""
        return self.taken + (sequences - self.sequences) * self.per_sequence

    def most(self, share: int) -> int:
        """The largest divisor of ``share`` that fits, and 1 when none does: equal micro-batches waste nothing.

        A number that was tried fits, or nothing does.
        """
        return max((n for n in range(1, share + 1) if share % n == 0 and self.need(n) <= self.budget), default=1)


def fitting_micro_batch(
    strategy: Strategy, optimizer: torch.optim.Optimizer, data: Stream, ranks: Ranks
) -> tuple[int, Measured | None]:
    """The most sequences that fit in one micro-batch on every rank. Collective.

    Returns:
        The number, and what the rank that decided it measured; None when a rank has but one sequence, so that there was
        nothing to measure.

    Raises:
        ConfigError: the model has no ``loss``, or the strategy cannot take back a pass.
    """
    if not callable(getattr(strategy.module, "loss", None)):
        raise ConfigError(
            [
                f'micro_batch is "auto", which measures a pass of model.loss(batch), and {type(strategy.module).__name__} has no '
                "such method. Give it one that returns the sum over the batch's valid tokens, or set micro_batch to a number."
            ]
        )
    if data.share == 1:
        return 1, None
    with _without_trace(strategy, ranks.device):
        strategy.rehearse(_sample(data, 1))  # pays for what comes once; gradients stay, as they do between micro-batches
        budget = int(PART_OF_FREE * devices.memory(ranks.device, local_size=ranks.local_size).free)
        budget -= _state_to_come(strategy.without_state(optimizer), ranks.device)
        sequences, taken = 1, _peak_of_pass(strategy, _sample(data, 1), ranks.device)
        per_sequence = taken
        while 2 * sequences <= data.share and all(ranks.gather(2 * taken <= budget)):
            half, taken = taken, _peak_of_pass(strategy, _sample(data, 2 * sequences), ranks.device)
            per_sequence = max(0, -(-(taken - half) // sequences))
            sequences *= 2
        found = Measured(sequences=sequences, taken=taken, per_sequence=per_sequence, budget=budget)
    everyone = [Measured(**measured) for measured in ranks.gather(vars(found))]
    tightest = min(everyone, key=lambda measured: measured.most(data.share))
    return tightest.most(data.share), tightest


def said(number: int, measured: Measured | None, *, share: int) -> str:
    """The choice in a sentence, with what it rests on."""
    line = f"Micro-batch: {number} of a rank's {share} sequences a step"
    if measured is None:
        return f"{line}."
    warning = "" if measured.need(number) <= measured.budget else " Even that may not fit: shard more, or recompute activations."
    return (
        f"{line}. A pass over {measured.sequences} took {sized(measured.taken)}, each further sequence takes "
        f"{sized(measured.per_sequence)}, and {sized(max(0, measured.budget))} are there for it.{warning}"
    )


@contextlib.contextmanager
def advised(*, settings: TrainSettings, step: int, ranks: Ranks) -> Iterator[None]:
    """Let an allocation that fails while training say what to change.

    It ends the run: once shards are half exchanged, trying again in the same process would hang or train on garbage.

    Raises:
        MemoryError: an allocation failed.
    """
    try:
        yield
    except RuntimeError as error:
        if not devices.is_out_of_memory(error):
            raise
        raise MemoryError(_out_of_memory_advice(error, settings=settings, step=step, ranks=ranks)) from error


def _out_of_memory_advice(error: RuntimeError, *, settings: TrainSettings, step: int, ranks: Ranks) -> str:
    advice = []
    if isinstance(settings.micro_batch, int) and settings.micro_batch > 1:
        advice.append(f"micro_batch to {settings.micro_batch // 2} (it is {settings.micro_batch})")
    if settings.activation_checkpointing != "full":
        advice.append(f'activation_checkpointing to "full" (it is "{settings.activation_checkpointing}")')
    if settings.strategy not in ("fsdp2", "zero3"):
        advice.append(f'strategy to "fsdp2" or "zero3" (it is "{settings.strategy}")')
    remedy = f"Set {', or '.join(advice)}." if advice else "Use more ranks, or shorter sequences."
    return (
        f"Out of memory on rank {ranks.rank} ({devices.name(ranks.device)}) in step {step}: {str(error).splitlines()[0]} The run "
        f"ended and goes on from its last checkpoint when it is started again. {remedy}"
    )


def _peak_of_pass(strategy: Strategy, batch: Any, device: torch.device) -> int:
    """Bytes that a forward and backward pass takes at most, beside what was there before."""
    if device.type == "cpu":
        with _LiveBytes() as live:
            strategy.rehearse(batch)
        return int(live.peak)
    devices.synchronize(device)
    before = devices.allocated_bytes(device)
    devices.reset_peak(device)
    strategy.rehearse(batch)
    devices.synchronize(device)
    return devices.peak_bytes(device) - before


def _sample(data: Stream, sequences: int) -> Batch:
    """Sequences of the data, padded to the full length, which examples may have in any micro-batch."""
    batch = data.sample(sequences)
    missing = data.sequence_length - batch.inputs.shape[1]
    return Batch(
        inputs=F.pad(batch.inputs, (0, missing)),
        targets=F.pad(batch.targets, (0, missing), value=IGNORED) if batch.targets.dim() == 2 else batch.targets,
        present=None if batch.present is None else F.pad(batch.present, (0, missing)),
    )


def _state_to_come(without_state: Iterable[Tensor], device: torch.device) -> int:
    return STATE_BYTES * sum(_local(tensor).numel() for tensor in without_state if tensor.device.type == device.type)


@contextlib.contextmanager
def _without_trace(strategy: Strategy, device: torch.device) -> Iterator[None]:
    """Give back gradients, buffers and random streams as they were. What is compiled runs uncompiled, else two sizes would
    be compiled that training never sees."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in strategy.module.buffers()]
    python, legacy = random.getstate(), np.random.get_state()
    own = {} if device.type == "cpu" else {"devices": [device.index], "device_type": device.type}
    with torch.random.fork_rng(**(own or {"devices": []})), torch.compiler.set_stance("force_eager"):
        yield
    strategy.forget_gradients()
    random.setstate(python)
    np.random.set_state(legacy)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    devices.reset_peak(device)


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that operations made and that are still alive, and the most there were at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_local(leaf).untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = _local(leaf).untyped_storage()
                if storage._cdata not in given:  # else a view, or written in place
                    self._born(storage)
        return result

    def _born(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._dead, size)

    def _dead(self, size: int) -> None:
        self.live -= size


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor."""
    return getattr(tensor, "_local_tensor", tensor)
