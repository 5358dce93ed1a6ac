"""fp16, bf16 and what else chooses a number format."""

from __future__ import annotations

from trainrun.deepspeed_json.section import AUTO, Section, flag, number, one_of, whole
from trainrun.deepspeed_json.translation import Translation

FP16_SCALE = ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


def read_precision(top: Section, into: Translation) -> None:
    """`precision` from the blocks that are enabled; "auto" leaves it to the settings."""
    enabled = {"fp16": _read_fp16(top, into), "bf16": _read_bf16(top, into)}
    top.refuse("amp", "NVIDIA's Apex is gone from DeepSpeed. Use fp16 or bf16.")
    top.refuse("torch_autocast", "Use bf16, which is autocast already in every strategy without DeepSpeed.")
    on = [name for name, value in enabled.items() if value is True]
    if len(on) == 2:
        into.problems.append("deepspeed.fp16.enabled and deepspeed.bf16.enabled are both true. Switch one of them off.")
    elif on:
        into.say("precision", on[0], f"deepspeed.{on[0]}.enabled")
    elif AUTO in enabled.values():
        into.leave("precision")
    elif off := [name for name, value in enabled.items() if value is False]:
        into.say("precision", "fp32", f"deepspeed.{off[0]}.enabled")


def _read_fp16(top: Section, into: Translation) -> bool | str | None:
    fp16 = top.section("fp16")
    if fp16 is None:
        return None
    enabled: bool | str | None = fp16.take(flag, "enabled", auto=True)
    scale = fp16.take(number(0), "loss_scale", auto=True)
    if enabled is True and scale not in (None, 0, AUTO):
        into.problems.append(
            f"{fp16.where('loss_scale')} is {scale:g}, a scale that stays. Allowed: 0, since fp16 has a dynamic loss scale here."
        )
    shaped = [name for name in FP16_SCALE if fp16.take(whole(0), name, auto=True) not in (None, AUTO)]
    shaped += ["consecutive_hysteresis"] if fp16.take(flag, "consecutive_hysteresis") else []
    if enabled is True and shaped:
        keys = ", ".join(fp16.where(name) for name in shaped)
        into.notes.append(f"{keys}: the dynamic loss scale is trainrun's own, the same in every strategy.")
    fp16.ignore("auto_cast", "opt_level")  # inputs are token ids; the level was Apex's
    fp16.refuse("fp16_master_weights_and_grads", "Weights that are updated and the optimizer's state stay in fp32.")
    fp16.finish()
    return enabled


def _read_bf16(top: Section, into: Translation) -> bool | str | None:
    bf16 = top.section("bf16", "bfloat16")
    if bf16 is None:
        return None
    enabled: bool | str | None = bf16.take(flag, "enabled", auto=True)
    if bf16.take(flag, "check_grad_overflow", "check_overflow", auto=True) is True and enabled is True:
        into.notes.append(
            f"{bf16.where('check_grad_overflow')}: in bf16 a gradient that is not finite ends the run; no step is skipped."
        )
    bf16.take(flag, "immediate_grad_update", auto=True)  # gradients go to fp32 as they come in either case
    for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        bf16.refuse(name, "Weights that are updated and the optimizer's state stay in fp32.")
    bf16.finish()
    return enabled


def read_number_formats(top: Section) -> None:
    """In which formats gradients travel and are summed up: fp32 in every strategy here, so nothing else is taken."""
    top.take(one_of("fp32", "float32"), "communication_data_type", auto=True)
    top.take(one_of("fp32", "float32"), "seq_parallel_communication_data_type", auto=True)
    if formats := top.section("data_types"):
        formats.take(one_of("fp32", "float32"), "grad_accum_dtype", auto=True)
        formats.finish()
