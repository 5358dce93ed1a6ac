"""A DeepSpeed file as a layer of settings, under those that the user gives and over trainrun's defaults."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from trainrun.config import ConfigError, merge
from trainrun.deepspeed_json.batch import NAMES, BatchSizes
from trainrun.deepspeed_json.translate import translate
from trainrun.deepspeed_json.translation import Said, Translation
from trainrun.settings.train import TrainSettings
from trainrun.words import counted

STANDARD = TrainSettings()


def with_deepspeed(
    given: Mapping[str, Any], *, origins: Mapping[str, str], ranks: int | None = None, defaults: TrainSettings = STANDARD
) -> dict[str, Any]:
    """Settings with what their ``deepspeed`` mapping says under them.

    Args:
        given: the settings that the user gives, ``deepspeed`` among them; without it they are returned as they are.
        origins: by a dotted name, also of a key of the file or of all below it, or "" for all others, where it is given; for
            messages.
        ranks: how many ranks there are; None while that is not known, and then batch sizes that depend on it stay as they are.
        defaults: what a setting is that neither gives.

    Raises:
        ConfigError: everything that is wrong with the file, and every setting that the two give differently.
    """
    document = given.get("deepspeed")
    if not document or not isinstance(document, Mapping):
        return dict(given)
    translation = translate(document)
    _add_batch(translation, given, origins, ranks, defaults)
    wrong = [f"{_origin(origins, _key(problem))}: {problem}" for problem in translation.problems]
    problems = [*wrong, *_contradictions(translation, given, origins)]
    if problems:
        raise ConfigError(problems)
    below: dict[str, Any] = {}
    implied = {"strategy": "ddp"} if translation.stage is None else {}
    said = {setting: each.value for setting, each in translation.said.items()}
    for setting, value in {**implied, **translation.implied, **said}.items():
        below = merge(below, _nested(setting, value))
    return merge(below, given)


def _nested(setting: str, value: Any) -> dict[str, Any]:
    for name in reversed(setting.split(".")):
        value = {name: value}
    nested: dict[str, Any] = value
    return nested


def value_at(mapping: Mapping[str, Any], setting: str) -> Any:
    """The value at a dotted name, None when there is none."""
    value: Any = mapping
    for name in setting.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _contradictions(translation: Translation, given: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    for setting, said in translation.said.items():
        ours = value_at(given, setting)
        if ours is not None and not _same(ours, said.value):
            yield (
                f"{said.path} in {_origin(origins, _key(said.path))} makes {setting} {said.value!r}, "
                f"but {setting} is {ours!r} in {_origin(origins, setting)}. Change one of them."
            )


def _key(text: str) -> str:
    """The dotted name with which a text begins."""
    return text.split(maxsplit=1)[0]


def _origin(origins: Mapping[str, str], name: str) -> str:
    """Where a setting, or a key of the file, is given: what is known of the nearest that it is in."""
    while name and name not in origins:
        name = name.rpartition(".")[0]
    return origins.get(name, "the settings")


def _same(ours: Any, theirs: Any) -> bool:
    try:  # YAML 1.1 reads 3e-4 as text
        return ours == theirs or (not isinstance(theirs, str) and float(ours) == float(theirs))
    except (TypeError, ValueError):
        return False


def _add_batch(
    translation: Translation, given: Mapping[str, Any], origins: Mapping[str, str], ranks: int | None, defaults: TrainSettings
) -> None:
    """The sizes of a step and of a micro-batch from the file's three and what the user gives."""
    file = translation.batch
    unit = _unit(given, defaults)
    if file == BatchSizes() or unit is None:
        return
    setting, tokens = unit
    what = f" ({file.train} sequences of {tokens} tokens)" if setting == "batch_tokens" else ""
    if file.train is not None:
        translation.say(setting, file.train * tokens, f"deepspeed.{NAMES[0]}{what}")
    if file.micro is not None:
        translation.say("micro_batch", file.micro, f"deepspeed.{NAMES[1]}")
    sizes = batch_sizes(given, defaults=defaults)
    if sizes.accumulation is not None and (sizes.train, sizes.micro) == (None, None):
        translation.problems.append(
            f"deepspeed.{NAMES[2]} is {sizes.accumulation}, but micro_batch is "
            f"{given.get('micro_batch', defaults.micro_batch)!r} and nothing gives the size of a step. "
            f"Give micro_batch as a number or {setting}, or remove {NAMES[2]}."
        )
        return
    if ranks is None or any(_contradictions(translation, given, origins)):
        return
    try:
        sizes = sizes.with_ranks(ranks)
    except ConfigError as error:
        translation.problems.extend(error.problems)
        return
    if sizes.train is not None:
        translation.said.setdefault(
            setting, Said(sizes.train * tokens, f"deepspeed.{NAMES[1]} x {NAMES[2]} on {counted(ranks, 'rank')}")
        )
    if sizes.micro is not None:
        translation.said.setdefault("micro_batch", Said(sizes.micro, f"deepspeed.{NAMES[0]} on {counted(ranks, 'rank')}"))


def batch_sizes(given: Mapping[str, Any], *, defaults: TrainSettings = STANDARD) -> BatchSizes:
    """The sizes of the ``deepspeed`` mapping in ``given``, completed by the user's settings, and where nothing else decides by
    the defaults: what it says "auto" of, and the micro-batch of which it gives the accumulation alone. All None without such a
    mapping, or when a setting that counts is wrong.
    """
    document = given.get("deepspeed")
    file = translate(document).batch if isinstance(document, Mapping) else BatchSizes()
    unit = _unit(given, defaults)
    if file == BatchSizes() or unit is None:
        return BatchSizes()
    setting, tokens = unit
    step, micro = _whole(given.get(setting)), _whole(given.get("micro_batch"))
    train = file.train or (step // tokens if step else None)
    micro = file.micro or micro
    if train is None and NAMES[0] in file.automatic and [micro, file.accumulation].count(None):
        train = getattr(defaults, setting) // tokens or None  # of examples there may be no default
    if file.accumulation is not None and train is None and micro is None:
        micro = _whole(given.get("micro_batch", defaults.micro_batch))  # a step follows from it, as in DeepSpeed
    return BatchSizes(train, micro, file.accumulation, file.automatic)


def whole_batch(document: Mapping[str, Any] | str, *, ranks: int) -> int | None:
    """Sequences of a step over all ranks by the sizes of an accepted file alone; None where they do not say."""
    return translate(document).batch.with_ranks(ranks).train if isinstance(document, Mapping) else None


def _unit(given: Mapping[str, Any], defaults: TrainSettings) -> tuple[str, int] | None:
    """The setting of a step's size, and how much of it one sequence is. None when `TrainSettings` will refuse one of them."""
    model = value_at(given, "finetune.model") or defaults.finetune.model
    if _whole(given.get("batch_examples", defaults.batch_examples)) or (model and "batch_tokens" not in given):
        return "batch_examples", 1
    tokens = _whole(given.get("sequence_length", defaults.sequence_length))
    if tokens is None:
        return None
    step = _whole(given.get("batch_tokens", tokens))
    return ("batch_tokens", tokens) if step and step % tokens == 0 else None


def _whole(value: Any) -> int | None:
    """A number of 1 or more as `TrainSettings` will read it, which takes 1e6 for a whole one. None for all else."""
    is_whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1
    return int(value) if is_whole and 0 < value < math.inf else None
