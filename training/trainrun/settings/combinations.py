"""Which settings go together. What depends on the machine or on the number of ranks is found when a run starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainrun.settings.train import TrainSettings


def problems(settings: TrainSettings) -> list[str]:
    """Every combination among ``settings`` that no machine could run as it is said, or of which a part would be ignored.

    With strategy "auto" those are found that neither of the strategies it chooses among (ddp and fsdp2) could run.
    """
    return [
        *_offload(settings),
        *_sharding(settings),
        *_precision(settings),
        *_optimizer(settings),
        *_compile(settings),
        *_recomputing(settings),
        *_deepspeed(settings),
        *_checkpoint(settings),
    ]


def _offload(settings: TrainSettings) -> Iterator[str]:
    strategy = settings.strategy
    optimizer, parameters = settings.sharding.offload_optimizer, settings.sharding.offload_parameters
    said = f"sharding.offload_optimizer is {optimizer!r} and sharding.offload_parameters {parameters!r}"
    if strategy == "ddp" and (optimizer, parameters) != ("none", "none"):
        yield f'{said}, but ddp keeps all of the model on its device. Set strategy to "fsdp2", "zero1", "zero2" or "zero3".'
    if strategy in ("auto", "fsdp2") and "nvme" in (optimizer, parameters):
        yield f'{said}, but strategy is {strategy!r}, and "nvme" is DeepSpeed\'s. Set strategy to "zero3".'
    elif strategy in ("auto", "fsdp2") and optimizer != parameters:
        taken = ", which auto would take," if strategy == "auto" else ""
        yield (
            f"{said}, but fsdp2{taken} keeps parameters, gradients and optimizer state in one place. Set both to "
            '"cpu" or both to "none", or strategy to "zero3" (or, to offload the optimizer alone, "zero1" or "zero2").'
        )
    if strategy in ("zero1", "zero2"):
        if parameters != "none":
            yield (
                f"sharding.offload_parameters is {parameters!r}, but {strategy} keeps the parameters whole on every device. "
                'Set it to "none", or strategy to "zero3".'
            )
        if optimizer == "nvme":
            yield (
                f"sharding.offload_optimizer is 'nvme', which only zero3 has; strategy is {strategy!r}. "
                'Set it to "cpu", or strategy to "zero3".'
            )


def _sharding(settings: TrainSettings) -> Iterator[str]:
    strategy, sharding = settings.strategy, settings.sharding
    if sharding.shard_size and strategy not in ("auto", "fsdp2"):
        yield (
            f'sharding.shard_size is {sharding.shard_size}, which only "fsdp2" has; strategy is {strategy!r}. '
            'Set it to 0, or strategy to "fsdp2".'
        )
    if sharding.tensor_parallel > 1 and strategy.startswith("zero"):
        yield (
            f"sharding.tensor_parallel is {sharding.tensor_parallel}, but {strategy} divides flattened parameters, which "
            'cannot be split by columns and rows too. Set it to 1, or strategy to "fsdp2".'
        )
    if sharding.tensor_parallel > 1 and settings.precision == "fp8":
        yield (
            f'sharding.tensor_parallel is {sharding.tensor_parallel} and precision is "fp8", which do not go together here. '
            'Set precision to "bf16", or tensor_parallel to 1.'
        )


def _precision(settings: TrainSettings) -> Iterator[str]:
    if settings.tf32 and settings.precision != "fp32":
        yield (
            f"tf32 is true, which is for fp32 matrix products, but precision is {settings.precision!r}. "
            'Set it to false, or precision to "fp32".'
        )
    if settings.precision == "fp8" and settings.strategy.startswith("zero"):
        yield (
            f'precision is "fp8" and strategy is {settings.strategy!r}, which do not go together here. '
            'Set precision to "bf16", or strategy to "ddp" or "fsdp2".'
        )


def _optimizer(settings: TrainSettings) -> Iterator[str]:
    if settings.optimizer.name == "muon" and settings.strategy.startswith("zero"):
        yield (
            f'optimizer.name is "muon", which updates whole matrices, but {settings.strategy} hands the optimizer stretches of '
            'flattened parameters. Set it to "adamw", or strategy to "ddp" or "fsdp2".'
        )


def _compile(settings: TrainSettings) -> Iterator[str]:
    if settings.compile and settings.strategy == "zero3":
        yield (
            'compile is true and strategy is "zero3", whose gathering of parameters breaks every layer into pieces that '
            'torch.compile compiles again and again. Set compile to false, or strategy to "zero2" or "fsdp2".'
        )


def _recomputing(settings: TrainSettings) -> Iterator[str]:
    # DeepSpeed's own linear layers are what stage 3 computes again, and their gradients would be wrong where there is a bias
    if settings.activation_checkpointing == "selective" and settings.strategy == "zero3":
        yield (
            'activation_checkpointing is "selective" and strategy is "zero3", whose linear layers with a bias would get wrong '
            'gradients. Set activation_checkpointing to "full", or strategy to "fsdp2".'
        )


def _deepspeed(settings: TrainSettings) -> Iterator[str]:
    if settings.deepspeed and settings.strategy in ("auto", "fsdp2"):
        yield (
            f"deepspeed is given, but strategy is {settings.strategy!r}, not DeepSpeed's. Remove it, or set strategy to "
            '"zero1", "zero2" or "zero3" (or to "ddp", for a file of stage 0).'
        )


def _checkpoint(settings: TrainSettings) -> Iterator[str]:
    if settings.checkpoint.keep_every_steps > settings.steps >= 1:
        yield (
            f"checkpoint.keep_every_steps is {settings.checkpoint.keep_every_steps}, and the run has {settings.steps} steps: no "
            "checkpoint would be kept for it. Set it to fewer steps, or to 0."
        )
