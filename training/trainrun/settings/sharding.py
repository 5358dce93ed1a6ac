"""How a model is spread over the ranks, beyond the name of the strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainrun.config import ConfigError

Offload = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class ShardingSettings:
    """What the strategies share; what one of them has no use for is refused, not ignored."""

    shard_size: int = 0
    """Ranks over which "fsdp2" shards the model; replicas of it are made over the rest (hybrid sharding). 0 means all ranks."""
    tensor_parallel: int = 1
    """Ranks that split each matrix product of the bundled GPT; they read the same data. With "ddp" (1 data rank) and "fsdp2"."""
    offload_optimizer: Offload = "none"
    """Where the optimizer's state and update live: "cpu" (fsdp2, zero1-3) or "nvme" (zero3)."""
    offload_parameters: Offload = "none"
    """Where parameters live between their uses: "cpu" (fsdp2, zero3) or "nvme" (zero3)."""
    nvme_path: str = ""
    """Folder on a fast local disk, for "nvme"."""

    def __post_init__(self) -> None:
        problems = []
        if self.shard_size < 0:
            problems.append(f"shard_size is {self.shard_size}. Allowed: 0 (all ranks) or more.")
        if self.tensor_parallel < 1:
            problems.append(f"tensor_parallel is {self.tensor_parallel}. Allowed: 1 or more.")
        wants_disk = "nvme" in (self.offload_optimizer, self.offload_parameters)
        if wants_disk and not self.nvme_path:
            problems.append('Offload to "nvme" needs nvme_path: a folder on a local disk, such as the instance store\'s mount.')
        if self.nvme_path and not wants_disk:
            problems.append(f'nvme_path is {self.nvme_path!r}, but nothing is offloaded to "nvme". Remove it or set an offload.')
        if problems:
            raise ConfigError(problems)
