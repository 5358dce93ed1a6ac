"""What is left for DeepSpeed's engine, with every "auto" resolved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from trainrun.config import ConfigError
from trainrun.deepspeed_json.batch import NAMES
from trainrun.deepspeed_json.section import AUTO
from trainrun.deepspeed_json.translate import translate
from trainrun.deepspeed_json.translation import Translation
from trainrun.deepspeed_json.zero import BY_WIDTH
from trainrun.settings.train import TrainSettings
from trainrun.words import counted

ZERO = "zero_optimization"


def engine_tuning(document: Mapping[str, Any], *, stage: int, hidden_size: int | None) -> dict[str, Any]:
    """The part of a DeepSpeed configuration that has no setting of trainrun's: bucket sizes, pinning, timers and the like.

    "auto" sizes follow from the model's hidden size h by the formulas of Hugging Face's DeepSpeed guide: reduce_bucket_size
    h * h, stage3_prefetch_bucket_size 0.9 * h * h, stage3_param_persistence_threshold 10 * h (UX-02).

    Args:
        document: ``settings.deepspeed``, as `translate` has accepted it.
        stage: of ZeRO, 1 to 3.
        hidden_size: of the model; None when it has none that is known.

    Raises:
        ConfigError: "auto" for a model without a hidden size, by key path.
    """
    tuning = translate(document).tuning
    zero = dict(tuning.get(ZERO, {}))
    sizes = {} if hidden_size is None else by_width(hidden_size)
    problems = []
    for name in BY_WIDTH:
        if zero.get(name) != AUTO:
            continue
        if name in sizes:
            zero[name] = sizes[name]
        elif name.startswith("stage3_") and stage < 3:
            del zero[name]
        else:
            problems.append(
                f"deepspeed.{ZERO}.{name} is 'auto', which follows from the model's hidden size, but the model names none (as "
                "model.config.hidden_size). Give a number."
            )
    if problems:
        raise ConfigError(problems)
    rest = {name: value for name, value in tuning.items() if name != ZERO}
    return {**rest, ZERO: zero} if zero else rest


def by_width(hidden_size: int) -> dict[str, int]:
    """The sizes that "auto" stands for, in elements."""
    sizes = (hidden_size * hidden_size, int(0.9 * hidden_size * hidden_size), 10 * hidden_size)
    return dict(zip(BY_WIDTH, sizes, strict=True))


def remarks(settings: TrainSettings) -> list[str]:
    """What became of "auto" in the DeepSpeed file of a run, and what of it has another effect here than there, as sentences."""
    assert isinstance(settings.deepspeed, Mapping)
    if not settings.deepspeed:
        return []
    translation, strategy = translate(settings.deepspeed), settings.strategy
    idle = sorted(name for name in translation.tuning.get(ZERO, {}))
    unused = (
        [f"deepspeed.{ZERO}: {', '.join(idle)} have no effect on strategy {strategy!r}."] if idle and strategy == "ddp" else []
    )
    return [*_became(translation, settings), *translation.notes, *_left_out(translation, settings), *unused]


def _became(translation: Translation, settings: TrainSettings) -> Iterator[str]:
    step = "batch_examples" if settings.batch_examples else "batch_tokens"
    sizes = [setting for name, setting in zip(NAMES, (step, "micro_batch"), strict=False) if name in translation.batch.automatic]
    values = [f"{setting} {attrgetter(setting)(settings)}" for setting in (*translation.automatic, *sizes)]
    if "precision fp32" in values:
        values[values.index("precision fp32")] += " (--precision=bf16 or fp16 decides)"
    if values:
        yield f'"auto" in the DeepSpeed file became: {", ".join(values)}.'


def _left_out(translation: Translation, settings: TrainSettings) -> Iterator[str]:
    """What DeepSpeed would not do without a key, and trainrun does."""
    decided = {*translation.said, *translation.automatic}
    optimizer = settings.optimizer
    if "optimizer.clip_norm" not in decided and optimizer.clip_norm:
        yield (
            "deepspeed.gradient_clipping is not set, without which DeepSpeed does not clip: gradients are clipped at "
            f"{optimizer.clip_norm:g} here (optimizer.clip_norm; 0 switches it off)."
        )
    if "optimizer.schedule" not in decided and (optimizer.schedule != "constant" or optimizer.warmup_steps):
        yield (
            "deepspeed.scheduler is not set, without which DeepSpeed keeps the learning rate: here it has a warm-up of "
            f"{counted(optimizer.warmup_steps, 'step')} and the schedule {optimizer.schedule!r} (optimizer.warmup_steps, "
            "optimizer.schedule)."
        )
