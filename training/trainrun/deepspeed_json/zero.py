"""The block zero_optimization. Names and types are those of DeepSpeed 0.19's own classes, which the tests compare with."""

from __future__ import annotations

from typing import Any

from trainrun.deepspeed_json.section import AUTO, Section, flag, mapping, number, one_of, text, texts, whole
from trainrun.deepspeed_json.translation import Translation

STRATEGIES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}

BY_WIDTH = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""Sizes that "auto" makes follow from the model's hidden size."""

SIZES = {
    "reduce_bucket_size": 1,
    "allgather_bucket_size": 1,
    "sub_group_size": 1,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_model_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_module_granularity_threshold": 0,
}
"""Counts of elements, and the least of each: DeepSpeed divides by the first three, although it takes 0 for two of them."""

FLAGS = (
    "allgather_partitions",
    "contiguous_gradients",
    "enable_sanity_checks",
    "ignore_unused_parameters",
    "log_trace_cache_warnings",
    "memory_efficient_linear",
    "override_module_apply",
    "overlap_comm",
    "reduce_scatter",
    "round_robin_gradients",
    "stage3_allgather_sequential",
    "stage3_use_all_reduce_for_fetch_params",
    "use_multi_rank_bucket_allreduce",
)

OWN_CHECKPOINTS = (
    "elastic_checkpoint",
    "load_from_fp32_weights",
    "pipeline_loading_checkpoint",
    "stage3_gather_16bit_weights_on_model_save",
    "gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)
"""About DeepSpeed's checkpoints. trainrun's hold the whole fp32 weights, whatever the stage and the number of ranks."""

REFUSED = {
    "legacy_stage1": "Remove it: ZeRO-1 is DeepSpeed's present one.",
    "parameter_alignment": "Remove it: it changes where parameters lie, by which checkpoints find them.",
    "save_muon_momentum_buffer_in_memory": "Muon is not offloaded here. Remove it.",
    "zenflow": "It updates parameters out of step with the other strategies. Remove it.",
    "zero_quantized_weights": "It rounds what ranks send, so that losses differ from those of other strategies. Remove it.",
    "zero_quantized_nontrainable_weights": "It rounds what ranks send. Remove it.",
    "zero_quantized_gradients": "It rounds what ranks send, so that losses differ from those of other strategies. Remove it.",
    "mics_shard_size": "DeepSpeed has removed MiCS. Use strategy 'fsdp2' with sharding.shard_size instead.",
    "mics_hierarchical_params_gather": "DeepSpeed has removed MiCS. Use strategy 'fsdp2' with sharding.shard_size instead.",
    "zeropp_loco_param": "DeepSpeed has removed it. Remove it here too.",
}


def read_zero(top: Section, into: Translation) -> None:
    """`strategy` and the offloads of `sharding`; what only tunes ZeRO goes to the engine."""
    zero = _block(top)
    if zero is None:
        return
    stage = zero.take(one_of(0, 1, 2, 3), "stage")
    into.stage = stage
    if stage is not None:
        into.say("strategy", STRATEGIES[stage], zero.where("stage"))
    _read_offload(zero, into)
    tuning: dict[str, Any] = {}
    for name, least in SIZES.items():
        tuning[name] = zero.take(whole(least), name, name.removeprefix("stage3_"), auto=name in BY_WIDTH)
    for name in FLAGS:
        tuning[name] = zero.take(flag, name, name.removeprefix("stage3_"))
    _read_rest(zero, into, tuning)
    into.tune(tuning, "zero_optimization")
    zero.finish()


def _block(top: Section) -> Section | None:
    # true is an old spelling of stage 1
    content = top.take(lambda value: {"stage": int(value)} if isinstance(value, bool) else mapping(value), "zero_optimization")
    return None if content is None else Section(content, top.where("zero_optimization"), top.problems)


def _read_rest(zero: Section, into: Translation, tuning: dict[str, Any]) -> None:
    for name in OWN_CHECKPOINTS:
        zero.take(flag, name)
    for name, advice in REFUSED.items():
        zero.refuse(name, advice)
    if (zero.take(whole(0), "zero_hpz_partition_size") or 1) > 1:
        into.problems.append(
            f"{zero.where('zero_hpz_partition_size')} is not supported. To keep a copy of the model on every node use strategy "
            "'fsdp2' with sharding.shard_size."
        )
    if zero.take(flag, "compute_grad_norm") is False:
        into.problems.append(f"{zero.where('compute_grad_norm')} is False, but the norm clips and is logged. Remove it.")
    if leaves := zero.section("leaf_module"):
        tuning["leaf_module"] = {name: leaves.take(texts, name) or [] for name in ("classes", "names", "name_suffixes")}
        leaves.finish()


def _read_offload(zero: Section, into: Translation) -> None:
    for old, name, setting, read_tuning, least in (
        ("cpu_offload", "offload_optimizer", "offload_optimizer", _optimizer_tuning, 1),
        ("cpu_offload_param", "offload_param", "offload_parameters", _parameter_tuning, 3),
    ):
        block = zero.section(name)
        spelled = zero.take(flag, old)
        if spelled is not None and block is not None:
            into.problems.append(f"{zero.where(old)} is the old spelling of {zero.where(name)}. Remove one of them.")
        elif spelled is not None:
            into.say(f"sharding.{setting}", "cpu" if spelled else "none", zero.where(old))
        elif block is not None:
            _read_offload_block(block, into, setting, read_tuning(block))
        device = into.said.get(f"sharding.{setting}")
        if device is not None and device.value != "none" and (into.stage or 0) < least:
            into.problems.append(
                f"{device.path} offloads, for which {zero.where('stage')} is too low ({into.stage or 0}). Allowed with it: "
                f"{'1, 2 or 3' if least == 1 else '3'}."
            )
    zero.take(flag, "cpu_offload_use_pin_memory")  # DeepSpeed takes no notice of it any more


def _read_offload_block(block: Section, into: Translation, setting: str, tuning: dict[str, Any]) -> None:
    device = block.take(one_of("none", "cpu", "nvme"), "device", auto=True)
    folder = block.take(text, "nvme_path", auto=True)
    block.finish()
    if device != AUTO:
        into.say(f"sharding.{setting}", device or "none", block.where("device"))
    if device == "nvme" and folder not in (None, AUTO):
        into.say("sharding.nvme_path", folder, block.where("nvme_path"))
    if device not in (None, "none"):
        into.tune(tuning, "zero_optimization", block.name)


def _optimizer_tuning(block: Section) -> dict[str, Any]:
    if (block.take(number(0), "ratio") or 0.0) not in (0.0, 1.0):
        block.problems.append(
            f"{block.where('ratio')} leaves a part of the optimizer's state on the device, which is not supported. Use 1."
        )
    block.refuse("super_offload", "It needs an optimizer of DeepSpeed's own. Remove it.")
    block.ignore("cpuadam_cores_perc")  # of super_offload
    return {
        **{name: block.take(flag, name) for name in ("pin_memory", "pipeline_read", "pipeline_write", "fast_init")},
        "buffer_count": block.take(whole(0), "buffer_count"),
    }


def _parameter_tuning(block: Section) -> dict[str, Any]:
    return {
        "pin_memory": block.take(flag, "pin_memory"),
        **{name: block.take(whole(0), name) for name in ("buffer_count", "buffer_size", "max_in_cpu")},
    }
