"""What else a DeepSpeed file can hold."""

from __future__ import annotations

from trainrun.deepspeed_json.section import AUTO, Section, flag, number, one_of, whole
from trainrun.deepspeed_json.translation import Translation

REMOVED = "DeepSpeed has removed it. Remove it here too."
OWN_METRICS = "trainrun writes metrics itself: metric lines in the run's folder. Remove it."
REFUSED = {
    "autotuning": "It starts jobs of its own. Set micro_batch to 'auto' instead.",
    "comet": OWN_METRICS,
    "comms_logger": "Set profile.start_step instead: the trace shows every collective.",
    "compile": "Set compile instead.",
    "compression_training": REMOVED,
    "csv_monitor": OWN_METRICS,
    "curriculum_learning": REMOVED,
    "data_efficiency": "The order of the data is the dataset's, the same in every strategy.",
    "datastates_checkpointing": "trainrun writes checkpoints itself. Remove it.",
    "disable_allgather": "It is of no use with ZeRO.",
    "disable_python_gc": "Remove it.",
    "eigenvalue": REMOVED,
    "elasticity": "Any number of ranks takes the same steps here. Remove it.",
    "expert_parallel": "Experts are not divided among ranks here.",
    "flops_profiler": "Set profile.start_step instead.",
    "graph_harvesting": REMOVED,
    "hybrid_engine": "It is for generation during training.",
    "nebula": REMOVED,
    "pipeline": "Use strategy 'zero3' or 'fsdp2' for models that do not fit.",
    "prescale_gradients": "Gradients are sums in fp32, in which nothing overflows. Remove it.",
    "progressive_layer_drop": REMOVED,
    "quantize_training": REMOVED,
    "sequence_parallel_size": "Sequences are not divided among ranks here.",
    "sparse_attention": REMOVED,
    "sparse_gradients": REMOVED,
    "tensor_parallel": "Use sharding.tensor_parallel with strategy 'fsdp2' instead.",
    "tensorboard": OWN_METRICS,
    "use_data_before_expert_parallelism": "Experts are not divided among ranks here.",
    "wandb": OWN_METRICS,
    "weight_quantization": "It is for inference.",
}

AIO = {"block_size": whole(1), "queue_depth": whole(1), "intra_op_parallelism": whole(1)}
AIO_FLAGS = ("single_submit", "overlap_events", "use_gds")


def read_others(top: Section, into: Translation) -> None:
    """Switches of the engine, what has another name here, and what is refused."""
    into.tune({name: top.take(flag, name) for name in ("wall_clock_breakdown", "memory_breakdown", "dump_state")})
    if aio := top.section("aio"):
        values = {name: aio.take(kind, name) for name, kind in AIO.items()} | {name: aio.take(flag, name) for name in AIO_FLAGS}
        into.tune(values, "aio")
        aio.finish()
    _read_activation_checkpointing(top, into)
    _read_optimizer_checks(top, into)
    top.take(one_of(1, 1.0), "gradient_predivide_factor")
    top.take(one_of("mean"), "gradient_allreduce_op")
    if top.section("checkpoint") is not None:
        into.notes.append(f"{top.where('checkpoint')} is about DeepSpeed's checkpoints: trainrun writes its own.")
    _read_printing(top, into)
    for name, advice in REFUSED.items():
        top.refuse(name, advice)


def _read_printing(top: Section, into: Translation) -> None:
    # files say Infinity for never
    every = top.take(lambda value: value if value == float("inf") else whole(1)(value), "steps_per_print", auto=True)
    if every not in (None, AUTO):
        into.notes.append(f"{top.where('steps_per_print')}: progress is trainrun's line every log_every steps.")
    top.ignore("log_level", "vocabulary_size", "dataloader_drop_last", "managed_gradient_accumulation", "timers")


def _read_optimizer_checks(top: Section, into: Translation) -> None:
    """Switches with which DeepSpeed lets an optimizer pass that it did not make."""
    top.take(flag, "zero_allow_untested_optimizer")
    if top.take(flag, "zero_force_ds_cpu_optimizer") is True:
        into.notes.append(
            f"{top.where('zero_force_ds_cpu_optimizer')}: the optimizer's state that is offloaded is updated on the CPU by "
            "torch's fused AdamW, which needs no compiler."
        )


def _read_activation_checkpointing(top: Section, into: Translation) -> None:
    block = top.section("activation_checkpointing")
    if block is None:
        return
    wants = [
        name
        for name in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
        if block.take(flag, name) is True
    ]
    block.take(number(0), "number_checkpoints")
    for name in ("synchronize_checkpoint_boundary", "profile"):
        block.take(flag, name)
    block.finish()
    if wants:
        into.implied["activation_checkpointing"] = "full"
        into.notes.append(
            f"{', '.join(block.where(name) for name in wants)}: activation_checkpointing says what is recomputed ('full' unless "
            "you set it), and what is kept stays whole on its device."
        )
