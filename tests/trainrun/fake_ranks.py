"""Ranks in the test's own process, one after the other, between which nothing is really sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainrun.ranks import Ranks

T = TypeVar("T")


def on_each_rank(world: int, act: Callable[[Ranks], T]) -> list[T]:
    """What ``act`` gives on every rank of a world in which nothing is really sent, one rank after the other."""
    results = []
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            results.append(act(Ranks(rank, world, rank, torch.device("cpu"), None, None)))
        finally:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()  # it would hand on the mesh of this rank ...
            _clear_fast_path_sharding_prop_cache()  # ... to the next one
    return results
