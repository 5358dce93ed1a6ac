"""What a run says to people: one dense line a step, and one at its end."""

from __future__ import annotations

from typing import Any

from trainrun.settings import TrainSettings
from trainrun.words import counted


def step_line(record: dict[str, Any], *, spread: str, width: int | None = None) -> str:
    """The line of a metrics record.

    Args:
        record: as `docs/metrics.md` describes it.
        spread: what `spread_of` says.
        width: columns there are. Fields that do not fit are left out, the last first; None keeps all.
    """
    step, steps, mfu = record["step"], record["steps"], record["mfu"]
    fields = [
        f"step {step:>{len(str(steps))}}/{steps}",
        f"loss {record['loss']:.4f}",
        f"lr {record['learning_rate']:.1e}",
        f"norm {record['gradient_norm']:.2f}",
        f"{scaled(record['tokens_per_second'])} tok/s",
        *([] if mfu is None else [f"mfu {100 * mfu:.1f}%"]),
        f"{duration(record['seconds_left'])} left",
        f"data {100 * record['data_wait']:.1f}%",
        f"mem {sized(record['memory_bytes'])}",
        *([f"skipped {record['skipped']}"] if record["precision"] == "fp16" else []),
        f"{record['world']} x {spread} x {record['precision']}",
        *([] if mfu is None else [f"mfu by {record['mfu_convention']}"]),
    ]
    return fitting(fields, width)


def spread_of(settings: TrainSettings) -> str:
    """How the model is spread: "ddp+tp2" (tensor parallelism), "fsdp2/8" (hybrid, shards of 8), "zero3+cpu" (offload)."""
    sharding = settings.sharding
    shards = f"/{sharding.shard_size}" if sharding.shard_size else ""
    split = f"+tp{sharding.tensor_parallel}" if sharding.tensor_parallel > 1 else ""
    places = {sharding.offload_optimizer, sharding.offload_parameters}
    offload = "".join(f"+{place}" for place in ("cpu", "nvme") if place in places)
    return f"{settings.strategy}{shards}{split}{offload}"


def summary_line(record: dict[str, Any]) -> str:
    """The last line of a run, from what its "finished" event says."""
    mfu = "" if record["mfu"] is None else f", mfu {100 * record['mfu']:.1f}% by {record['mfu_convention']}"
    steps, tokens = counted(record["steps_here"], "step"), scaled(record["tokens_here"])
    return (
        f"Done at step {record['step']}: {steps} and {tokens} tokens in {duration(record['seconds'])}, "
        f"{scaled(record['tokens_per_second'])} tok/s{mfu}, {record['skipped']} skipped."
    )


def fitting(fields: list[str], width: int | None) -> str:
    """As many of the fields as fit, at least a part of the first."""
    line = fields[0][:width]
    for field in fields[1:]:
        if width is not None and len(line) + 2 + len(field) > width:
            break
        line = f"{line}  {field}"
    return line


def scaled(number: float) -> str:
    """Three digits and a unit: 81.2k."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 1000:
            return f"{number:.3g}{unit}" if abs(number) < 999.5 else f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.4g}T"


def sized(count: float) -> str:
    """Bytes with three digits: 61.2 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.3g} {unit}" if abs(count) < 999.5 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def duration(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
