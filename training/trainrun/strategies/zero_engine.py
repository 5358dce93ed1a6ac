"""DeepSpeed made ready in this process: on the run's own process group, with a configuration that leaves the run its say."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainrun.config import ConfigError, merge
from trainrun.deepspeed_json import engine_tuning
from trainrun.ranks import Ranks, require_group
from trainrun.settings import TrainSettings
from trainrun.strategies.facts import hidden_size_of
from trainrun.strategies.units import units

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}

SMALLEST_BUCKET, LARGEST_BUCKET = 2**22, 2**24
"""Elements of gradients that are reduced together: those of a layer within these bounds (16 and 64 MiB in fp32). DeepSpeed's
own default takes thirty times as much."""
LARGEST_PREFETCH = 50_000_000
"""Elements of parameters that stage 3 gathers ahead of their use at most, as by DeepSpeed's own default."""


def load_deepspeed(ranks: Ranks) -> Any:
    """Import DeepSpeed onto the run's process group: it starts none, compiles nothing, and is quiet below warnings.

    Raises:
        ConfigError: it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)
    os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))  # torchrun sets it, and DeepSpeed insists on it
    require_group(ranks.device)
    try:
        import deepspeed
        from deepspeed.ops import __compatible_ops__ as compatible
        from deepspeed.utils import groups, logger
    except ImportError as error:
        raise ConfigError(
            [
                "The strategies zero1, zero2 and zero3 are DeepSpeed's, which could not be imported "
                f'({error}). Install it: pip install "traincluster[deepspeed]".'
            ]
        ) from error
    # By itself it warns on stdout, between the lines of the run; as any other library it warns on stderr.
    logger.handlers[:] = [handler for handler in logger.handlers if type(handler) is not logging.StreamHandler]
    logger.propagate = True
    logger.addFilter(_worth_telling)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)  # its calls
    compatible["deepspeed_shm_comm"] = False  # on CPUs it would be compiled now, for minutes
    # DeepSpeed would make a second group of all ranks, whose time-outs would not be the run's.
    groups._WORLD_GROUP = dist.group.WORLD
    return deepspeed


def _worth_telling(record: logging.LogRecord) -> bool:
    """Not what the run tells itself (skipped steps) or has checked itself (optimizers)."""
    return not any(words in record.getMessage() for words in ("OVERFLOW", "untested optimizer"))


def start_engine(deepspeed: Any, model: nn.Module, optimizer: torch.optim.Optimizer, configuration: dict[str, Any]) -> Any:
    """DeepSpeed's engine around a model and the optimizer of its trainable parameters."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its use of memory, whatever it is told about logging
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration)
    return engine


Linear = Callable[..., Tensor]
"""As `torch.nn.functional.linear`."""


def zero_converter(configuration: dict[str, Any]) -> tuple[Callable[[nn.Parameter], None], Linear]:
    """For stage 3: what leaves of a whole parameter, the same on all ranks, this rank's share; and DeepSpeed's linear layer.

    That layer does not keep a gathered weight until the backward pass. DeepSpeed puts it into torch for all models and for
    good; here it is only there while its own model computes, by `linear_layers`.
    """
    from deepspeed.runtime.zero import Init

    with linear_layers(nn.functional.linear):
        zero = Init(module=nn.Module(), config_dict_or_path=configuration)
        linear = nn.functional.linear
    return lambda parameter: zero._convert_to_zero_parameters([parameter]), linear


@contextlib.contextmanager
def linear_layers(linear: Linear) -> Iterator[None]:
    """Let linear layers of all models compute by ``linear``."""
    before, nn.functional.linear = nn.functional.linear, linear
    try:
        yield
    finally:
        nn.functional.linear = before


def engine_configuration(settings: TrainSettings, model: nn.Module) -> dict[str, Any]:
    """What DeepSpeed's engine is told.

    Accumulation, clipping, learning rates and the loss scale are the run's, so that they are the same in every strategy: to
    DeepSpeed each step is one micro-batch. Gradients are summed, over ranks and over micro-batches, in fp32.

    Args:
        settings: what their ``deepspeed`` has that is no setting of ours (bucket sizes and the like) is in it too.
        model: its size bounds the buckets, and what is "auto" there follows from its width.

    Raises:
        ConfigError: "auto" for a model whose width is not known.
    """
    sharding = settings.sharding
    zero: dict[str, Any] = {"stage": STAGES[settings.strategy]}
    for kind, where in (("optimizer", sharding.offload_optimizer), ("param", sharding.offload_parameters)):
        if where != "none":
            zero[f"offload_{kind}"] = {"device": where, **({"nvme_path": sharding.nvme_path} if where == "nvme" else {})}
    required: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.optimizer.clip_norm,
        "zero_allow_untested_optimizer": True,  # its list is of class names; ours is in `trainrun.strategies.zero`
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW is as fast, and has not to be compiled first
        "zero_optimization": zero,
        "timers": {"throughput": {"enabled": False}},  # it synchronises with the device
    }
    if settings.precision == "bf16":  # the flag: gradients go to fp32 as they come, not after the whole backward pass
        required["bf16"] = {"enabled": True, "immediate_grad_update": True}
    if settings.precision == "fp16":  # to DeepSpeed the scale is static, because it is the run's
        required["fp16"] = {"enabled": True, "loss_scale": 1.0}
    if settings.precision != "fp32":
        required["data_types"] = {"grad_accum_dtype": "fp32"}
        required["communication_data_type"] = "fp32"
    document = settings.deepspeed if isinstance(settings.deepspeed, Mapping) else {}
    tuning = engine_tuning(document, stage=zero["stage"], hidden_size=hidden_size_of(model))
    return merge(merge({"zero_optimization": _sizes(model, zero["stage"])}, tuning), required)


def _sizes(model: nn.Module, stage: int) -> dict[str, int]:
    """Buffers by the size of the model: DeepSpeed's own defaults let stage 3 keep a model of a billion parameters gathered."""
    everything = _elements(model)
    unit = max((_elements(unit) for unit in units(model)), default=everything)
    sizes = {"reduce_bucket_size": max(1, min(everything, LARGEST_BUCKET, max(unit, SMALLEST_BUCKET)))}
    if stage == 3:
        sizes["stage3_prefetch_bucket_size"] = min(LARGEST_PREFETCH, unit)
        sizes["stage3_max_live_parameters"] = 3 * unit  # what computes, what comes next, and what is not let go yet
        sizes["stage3_max_reuse_distance"] = unit  # the last unit stays for the backward pass, which begins with it
    return sizes


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
