"""The processes of a run: who this one is, its device, and what all of them agree on.

Under torchrun the environment names rank and world. Without it the process is alone, and nothing here communicates.
What is agreed on travels as JSON over gloo groups of its own, beside the training's collectives and never by pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainrun import devices
from trainrun.config import ConfigError
from trainrun.words import counted

LONGEST_STORAGE_WAIT = 120.0
"""Seconds by which ranks wait for each other around a checkpoint beyond its own timeout."""


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    control: dist.ProcessGroup | None
    """For small agreements at every step; None when the process is alone."""
    storage: dist.ProcessGroup | None
    """For what waits on a store, which may take longer than a training step's collectives."""
    tensor_parallel: int = 1
    """Ranks that share one share of the data because they split each matrix product; neighbours by number."""
    local_size: int = 1
    """Ranks on this machine."""

    @property
    def data_rank(self) -> int:
        """Which of the shares of each batch is this rank's."""
        return self.rank // self.tensor_parallel

    @property
    def data_size(self) -> int:
        """Into how many shares each batch is divided."""
        return self.size // self.tensor_parallel

    @property
    def first(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """Tell people, on stderr, once for all ranks."""
        if self.first:
            print(text, file=sys.stderr, flush=True)

    def gather(self, value: Any) -> list[Any]:
        """The JSON-able ``value`` of every rank, on every rank, in the order of ranks."""
        if self.storage is None:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([mine.numel()]), group=self.storage)
        largest = max(int(size) for size in sizes)
        padded = torch.zeros(largest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        everyone = [torch.empty(largest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(everyone, padded, group=self.storage)
        return [json.loads(bytes(data[: int(size)].numpy())) for data, size in zip(everyone, sizes, strict=True)]

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each number over all ranks, on every rank."""
        if self.storage is None:
            return list(numbers)
        tensor = torch.tensor(numbers)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.storage)
        found: list[int] = tensor.tolist()
        return found

    def from_first(self, value: Any) -> Any:
        """The JSON-able ``value`` of rank 0, on every rank."""
        if self.storage is None:
            return value
        text = json.dumps(value).encode() if self.first else b""
        size = torch.tensor([len(text)])
        dist.broadcast(size, src=0, group=self.storage)
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if self.first else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self.storage)
        return json.loads(bytes(data.numpy()))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks, by the training's own group."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def set_timeout(self, seconds: float) -> None:
        """How long collectives wait from now on: those of every group there is now, but for the storage group's.

        Meshes (fsdp2, tensor parallelism) and DeepSpeed make groups of their own, which only PyTorch's register knows.
        """
        for group in list(dist.distributed_c10d._world.pg_map) if self.size > 1 else ():
            if group is not self.storage:
                group.set_timeout(timedelta(seconds=seconds))


def join(*, timeout_seconds: float, storage_timeout_seconds: float, tensor_parallel: int = 1) -> Ranks:
    """Meet the other ranks, if there are any.

    Args:
        timeout_seconds: how long a collective waits, until `Ranks.set_timeout` changes it.
        storage_timeout_seconds: how long the collectives around reading and writing checkpoints wait.
        tensor_parallel: ranks that split each matrix product.

    Raises:
        ConfigError: the ranks cannot be divided so, or there are fewer accelerators than ranks on this machine.
    """
    rank, size, local_rank = (int(os.environ.get(name, default)) for name, default in _TORCHRUN)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if size % tensor_parallel:
        raise ConfigError([f"sharding.tensor_parallel is {tensor_parallel}, which does not divide {counted(size, 'rank')}."])
    device = devices.of_rank(local_rank=local_rank, local_size=local_size)
    if size == 1:
        return Ranks(rank, size, local_rank, device, None, None, tensor_parallel, local_size)
    dist.init_process_group(devices.backend(device), timeout=timedelta(seconds=timeout_seconds))
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
    storage = dist.new_group(backend="gloo", timeout=timedelta(seconds=storage_timeout_seconds))
    return Ranks(rank, size, local_rank, device, control, storage, tensor_parallel, local_size)


def require_group(device: torch.device) -> None:
    """Make a process group of the one rank that is alone, for strategies that cannot do without."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(devices.backend(device), store=store, rank=0, world_size=1)


def leave() -> None:
    """End the process groups, so that the process ends quietly."""
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seed the random streams of Python, NumPy and torch on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # the legacy stream: the one that other code draws from
    torch.manual_seed(seed)


def stream_seed(seed: int, rank: int, step: int) -> int:
    """A seed for one rank's random streams from ``step`` on, unlike that of any other rank or step."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{rank}/{step}".encode()).digest()[:8], "big") >> 1


_TORCHRUN = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
