"""The blocks optimizer and scheduler, and gradient_clipping."""

from __future__ import annotations

from typing import Any

from trainrun.deepspeed_json.section import AUTO, Kind, Section, flag, number, one_of, text, whole
from trainrun.deepspeed_json.translation import Translation

OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "muon": "muon"}
"""DeepSpeed's Adam is AdamW unless ``adam_w_mode`` is false."""

DEFAULTS = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0}
"""What DeepSpeed's Adam takes for what the block leaves out."""

SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}

WARMUP_STEPS = 1000
"""DeepSpeed's default of ``warmup_num_steps``."""


def read_optimizer(top: Section, into: Translation) -> None:
    """`optimizer.name` and its numbers."""
    _say_number(top, into, "gradient_clipping", "optimizer.clip_norm", number(0))
    block = top.section("optimizer")
    if block is None:
        return
    block.ignore("legacy_fusion")
    kind = block.take(text, "type")
    parameters = block.section("params") or Section({}, block.where("params"), into.problems)
    block.finish()
    if kind is not None and kind.lower() not in OPTIMIZERS:
        into.problems.append(
            f"{block.where('type')} is {kind!r}. trainrun has AdamW (also as 'Adam') and Muon. Change it, or remove the block "
            "and give run.prepare an optimizer of your own."
        )
        return  # its numbers would mean something else
    if kind is not None:
        into.say("optimizer.name", OPTIMIZERS[kind.lower()], block.where("type"))
        into.implied.update({f"optimizer.{name}": value for name, value in DEFAULTS.items()})
    _read_numbers(parameters, into, muon=kind is not None and kind.lower() == "muon")
    parameters.finish()


def _read_numbers(parameters: Section, into: Translation, *, muon: bool) -> None:
    for key, setting, kind in (
        ("lr", "learning_rate", number(0, above=True)),
        ("eps", "epsilon", number(0, above=True)),
        ("weight_decay", "weight_decay", number(0)),
        *((("momentum", "momentum", number(0, below=1)),) if muon else ()),
    ):
        _say_number(parameters, into, key, f"optimizer.{setting}", kind)
    betas = parameters.take(_betas, "betas", auto=True)
    for name in ("beta1", "beta2"):
        if betas == AUTO:
            into.leave(f"optimizer.{name}")
        elif betas is not None:
            into.say(f"optimizer.{name}", betas[name == "beta2"], parameters.where("betas"))
    # how it is computed: torch's fused AdamW in either case
    for name in ("torch_adam", "fused", "foreach", "fp32_optimizer_states"):
        parameters.take(flag, name, auto=True)
    adam_w_mode = parameters.take(flag, "adam_w_mode", auto=True)
    decay = into.said.get("optimizer.weight_decay")
    if adam_w_mode is False and (decay is None or decay.value):
        into.problems.append(
            f"{parameters.where('adam_w_mode')} is False: weight decay would be part of the gradient. Allowed: true, as in "
            "AdamW, or a weight_decay of 0."
        )
    for name, only in (("bias_correction", True), ("amsgrad", False)):
        parameters.take(one_of(only), name)
    if parameters.take(number(0), "max_grad_norm") is not None:
        into.problems.append(
            f"{parameters.where('max_grad_norm')} is no setting of this optimizer. Use deepspeed.gradient_clipping."
        )


def _betas(value: Any) -> tuple[float, float]:
    one = number(0, below=1)
    try:
        first, second = value
        return one(first), one(second)
    except (TypeError, ValueError):
        raise ValueError("a list of two numbers, each 0 or more and less than 1") from None


def _say_number(section: Section, into: Translation, key: str, setting: str, kind: Kind) -> None:
    value = section.take(kind, key, auto=True)
    if value == AUTO:
        into.leave(setting)
    elif value is not None:
        into.say(setting, value, section.where(key))


def read_scheduler(top: Section, into: Translation) -> None:
    """`optimizer.schedule`, its warm-up, and `steps`."""
    block = top.section("scheduler")
    if block is None:
        return
    kind = block.take(text, "type")
    parameters = block.section("params") or Section({}, block.where("params"), into.problems)
    block.finish()
    if kind not in SCHEDULES:
        if kind is not None:
            into.problems.append(
                f"{block.where('type')} is {kind!r}. Allowed: {', '.join(SCHEDULES)}. Change it, or remove the block and set "
                "optimizer.schedule."
            )
        return
    into.say("optimizer.schedule", SCHEDULES[kind], block.where("type"))
    into.implied["optimizer.warmup_steps"] = WARMUP_STEPS
    _say_number(parameters, into, "warmup_num_steps", "optimizer.warmup_steps", whole(0))
    parameters.take(one_of(-1), "last_batch_iteration")
    _read_warmup(parameters, into, kind)
    if kind == "WarmupLR":
        parameters.take(whole(1), "total_num_steps", auto=True)  # it has no end; generators of files write it all the same
    else:
        _say_number(parameters, into, "total_num_steps", "steps", whole(1))
    if kind == "WarmupDecayLR":
        into.say("optimizer.final_fraction", 0.0, block.where("type"))
    if kind == "WarmupCosineLR":
        into.implied["optimizer.final_fraction"] = 1e-4
        _say_number(parameters, into, "cos_min_ratio", "optimizer.final_fraction", number(0, below=1.0001))
    parameters.finish()


def _read_warmup(parameters: Section, into: Translation, kind: str) -> None:
    start = "warmup_min_ratio" if kind == "WarmupCosineLR" else "warmup_min_lr"
    if (lowest := parameters.take(number(0), start, auto=True)) not in (None, AUTO, 0):
        into.problems.append(f"{parameters.where(start)} is {lowest:g}. Allowed: 0, from which every warm-up rises here.")
    shape = parameters.take(one_of("linear", "log"), "warmup_type")
    if shape == "log":
        into.problems.append(f"{parameters.where('warmup_type')} is 'log'. Allowed: 'linear'.")
    elif shape is None:
        into.notes.append(
            f"{parameters.where('warmup_type')} is not set, which is 'log' in DeepSpeed: the warm-up is linear here."
        )
    if kind == "WarmupCosineLR":
        return  # it goes by the optimizer's rate
    key, setting = "warmup_max_lr", "optimizer.learning_rate"
    peak = parameters.take(number(0, above=True), key, auto=True)
    if peak in (None, AUTO):
        return
    before = into.said.pop(setting, None)
    if before is not None and before.value != peak:
        into.notes.append(
            f"{parameters.where(key)} ({peak:g}) is the peak, not {before.path} ({before.value:g}), as in DeepSpeed."
        )
    into.say(setting, peak, parameters.where(key))
