"""Whether the machine's memory holds what is offloaded to it."""

from __future__ import annotations

import torch
from torch import nn

from trainrun import devices, memory
from trainrun.config import ConfigError
from trainrun.memory import readable_size
from trainrun.ranks import Ranks
from trainrun.settings import TrainSettings
from trainrun.strategies.facts import count
from trainrun.words import counted


def require_host_memory(settings: TrainSettings, ranks: Ranks, model: nn.Module) -> None:
    """Refuse an offload that this machine's memory cannot hold, before anything is allocated (UX-05).

    Raises:
        ConfigError: with what is needed and what there is.
    """
    sharding = settings.sharding
    states = memory.model_states(
        settings.strategy,
        count(model) // sharding.tensor_parallel,
        ranks=sharding.shard_size or ranks.data_size,
        precision=settings.precision,
        offload_optimizer=sharding.offload_optimizer,
        offload_parameters=sharding.offload_parameters,
    )
    there = devices.memory(torch.device("cpu"), local_size=1).total
    needed = states.host * ranks.local_size
    if needed > there:
        shards = sharding.shard_size or ranks.data_size
        raise ConfigError(
            [
                f"Offload needs {readable_size(needed)} of this machine's memory for its {counted(ranks.local_size, 'rank')} "
                f"({count(model):,} parameters divided among {shards}), which has {readable_size(there)}. Use more nodes, a type "
                'with more memory, or "nvme" with strategy zero3.'
            ]
        )
