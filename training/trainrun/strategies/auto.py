"""The strategy "auto": of those that fit into memory, the one that communicates least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from trainrun import devices, memory
from trainrun.config import ConfigError
from trainrun.memory import readable_size
from trainrun.ranks import Ranks
from trainrun.settings import TrainSettings
from trainrun.strategies.facts import Model, describe
from trainrun.words import counted


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What all ranks have."""

    memory: int
    """Bytes of the rank that has least."""
    ranks: int
    """Among which data and shards are divided."""
    local_ranks: int
    """Of them on one machine; as many as ``ranks`` where machines differ."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why."""

    settings: TrainSettings
    reason: str
    """One sentence."""


def choose(settings: TrainSettings, model: Model, machine: Machine) -> Choice:
    """Replicas (ddp) if they fit, else shards within each machine (fsdp2, hybrid), else shards over all ranks (fsdp2).

    What the user has set is kept: a shard_size, activation checkpointing, offload. Offload is never chosen.

    Raises:
        ConfigError: nothing fits, with the numbers and what would help.
    """
    needs: list[str] = []
    for name, shards in _candidates(settings, machine):
        need = _need(settings, model, name, shards)
        what = name if name == "ddp" else f"fsdp2 over {counted(shards, 'rank')}"
        if need <= machine.memory:
            kept = f"; {needs[-1]} would not fit" if needs else ""
            reason = (
                f"Strategy {what}: it takes about {readable_size(need)} of {readable_size(machine.memory)} a rank for "
                f"{model.parameters:,} parameters{_unknown(model)}{kept}."
            )
            shard_size = shards if name == "fsdp2" and shards < machine.ranks else 0
            sharding = replace(settings.sharding, shard_size=shard_size)
            return Choice(replace(settings, strategy=name, sharding=sharding), reason)
        needs.append(f"{what} ({readable_size(need)})")
    raise ConfigError([_nothing_fits(settings, model, machine, needs)])


def _candidates(settings: TrainSettings, machine: Machine) -> Iterator[tuple[Any, int]]:
    """Strategies and among how many ranks they divide the model, least communication first."""
    sharding = settings.sharding
    offloads = sharding.offload_parameters != "none"
    if sharding.shard_size:
        yield "fsdp2", sharding.shard_size
        return
    if not offloads and (sharding.tensor_parallel == 1 or machine.ranks == 1):
        yield "ddp", 1
    if 1 < machine.local_ranks < machine.ranks and machine.ranks % machine.local_ranks == 0:
        yield "fsdp2", machine.local_ranks
    if machine.ranks > 1 or offloads:
        yield "fsdp2", machine.ranks


def _need(settings: TrainSettings, model: Model, name: Any, shards: int) -> float:
    """Bytes on one rank."""
    precision, tensor_parallel = settings.precision, settings.sharding.tensor_parallel
    parameters = model.parameters // tensor_parallel
    states = memory.model_states(
        name,
        parameters,
        ranks=shards,
        precision=precision,
        offload_optimizer=settings.sharding.offload_optimizer,
        offload_parameters=settings.sharding.offload_parameters,
    )
    copies = memory.gathered(
        name,
        parameters,
        largest_unit=model.largest_unit // tensor_parallel,
        outside=model.outside // tensor_parallel,
        precision=precision,
    )
    return (states.device + copies + _pass(settings, model) / tensor_parallel) * memory.RESERVED


def _pass(settings: TrainSettings, model: Model) -> float:
    """Bytes of one micro-batch; where "auto" will measure how large it can be, of one sequence."""
    if model.shape is None:
        return 0.0
    tokens = (1 if settings.micro_batch == "auto" else settings.micro_batch) * settings.sequence_length
    kept = memory.activations(
        model.shape, tokens=tokens, precision=settings.precision, checkpointing=settings.activation_checkpointing
    )
    return kept + memory.logits(model.shape, tokens=tokens)


def _unknown(model: Model) -> str:
    return "" if model.shape is not None else " and what it computes, which is not known, comes on top"


def _nothing_fits(settings: TrainSettings, model: Model, machine: Machine, needs: list[str]) -> str:
    helps = []
    shards = machine.ranks * 2
    while shards <= 65536 and _need(settings, model, "fsdp2", shards) > machine.memory:
        shards *= 2
    if shards <= 65536:
        helps.append(f"{shards} ranks, with strategy fsdp2")
    if settings.activation_checkpointing != "full":
        helps.append('activation_checkpointing "full"')
    if settings.micro_batch not in (1, "auto"):
        helps.append("a smaller micro_batch")
    if settings.sharding.offload_parameters == "none":
        helps.append('sharding.offload_optimizer and offload_parameters "cpu" (slower)')
    return (
        f'Nothing that strategy "auto" chooses among fits: {model.parameters:,} parameters and a micro-batch take '
        f"about {', '.join(needs)} a rank, and {counted(machine.ranks, 'rank')} with {readable_size(machine.memory)} each "
        f"{'is' if machine.ranks == 1 else 'are'} there. What helps: "
        f"{', '.join(helps) or 'a smaller model'}. To try it all the same, name the strategy."
    )


def resolve(settings: TrainSettings, ranks: Ranks, model: nn.Module) -> Choice:
    """`choose` for a model on these ranks, with the same answer on all of them."""
    mine = [devices.memory(ranks.device, local_size=ranks.local_size).total, ranks.local_size]
    everyone = ranks.gather(mine)
    local = {size // ranks.tensor_parallel for _, size in everyone}
    machine = Machine(
        memory=min(total for total, _ in everyone),
        ranks=ranks.data_size,
        local_ranks=max(1, local.pop()) if len(local) == 1 else ranks.data_size,
    )
    return choose(settings, describe(model), machine)
