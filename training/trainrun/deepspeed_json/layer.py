"""A DeepSpeed file as a layer of settings, under those that the user gives and over trainrun's defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainrun.config import ConfigError, merge
from trainrun.deepspeed_json.batch import NAMES, BatchSizes
from trainrun.deepspeed_json.translate import translate
from trainrun.deepspeed_json.translation import Said, Translation

DEFAULT_SEQUENCE_LENGTH = 256
DEFAULT_BATCH_TOKENS = 16384
"""Of `trainrun.settings.TrainSettings`, which imports nothing from here and which a test compares."""


def with_deepspeed(given: Mapping[str, Any], *, origins: Mapping[str, str], ranks: int | None = None) -> dict[str, Any]:
    """Settings with what their ``deepspeed`` mapping says under them.

    Args:
        given: the settings that the user gives, ``deepspeed`` among them; without it they are returned as they are.
        origins: by a setting's dotted name, or "" for all others, where it is given; for messages.
        ranks: how many ranks there are; None while that is not known, and then batch sizes that depend on it stay as they are.

    Raises:
        ConfigError: everything that is wrong with the file, and every setting that the two give differently.
    """
    document = given.get("deepspeed")
    if not document or not isinstance(document, Mapping):
        return dict(given)
    translation = translate(document)
    _add_batch(translation, given, origins, ranks)
    problems = [*translation.problems, *_contradictions(translation, given, origins)]
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
                f"{said.path} in {_origin(origins, 'deepspeed')} makes {setting} {said.value!r}, but {setting} is {ours!r} in "
                f"{_origin(origins, setting)}. Change one of them."
            )
    strategy = given.get("strategy")
    if strategy in ("auto", "fsdp2") and "strategy" not in translation.said:
        yield (
            f"strategy is {strategy!r} in {_origin(origins, 'strategy')}, but {_origin(origins, 'deepspeed')} configures "
            "DeepSpeed. Use zero1, zero2 or zero3 (or ddp), or remove deepspeed."
        )


def _origin(origins: Mapping[str, str], setting: str) -> str:
    return origins.get(setting) or origins.get("", "the settings")


def _same(ours: Any, theirs: Any) -> bool:
    try:  # YAML 1.1 reads 3e-4 as text
        return ours == theirs or (not isinstance(theirs, str) and float(ours) == float(theirs))
    except (TypeError, ValueError):
        return False


def _add_batch(translation: Translation, given: Mapping[str, Any], origins: Mapping[str, str], ranks: int | None) -> None:
    """`batch_tokens` and `micro_batch` from the file's three sizes and what the user gives."""
    file = translation.batch
    if file == BatchSizes():
        return
    length = _whole(given.get("sequence_length"), DEFAULT_SEQUENCE_LENGTH)
    tokens = _whole(given.get("batch_tokens"), None)
    if length is None or (tokens is not None and tokens % length):
        return  # TrainSettings says what is wrong with them
    if file.train is not None:
        translation.say("batch_tokens", file.train * length, f"deepspeed.{NAMES[0]} ({file.train} sequences of {length} tokens)")
    if file.micro is not None:
        translation.say("micro_batch", file.micro, f"deepspeed.{NAMES[1]}")
    sizes = combined(file, given, length)
    if ranks is None or any(_contradictions(translation, given, origins)):
        return
    try:
        sizes = sizes.with_ranks(ranks)
    except ConfigError as error:
        translation.problems.extend(error.problems)
        return
    if sizes.train is not None and "batch_tokens" not in translation.said:
        translation.said["batch_tokens"] = Said(sizes.train * length, f"deepspeed.{NAMES[1]} x {NAMES[2]} on {ranks} ranks")
    if sizes.micro is not None and "micro_batch" not in translation.said:
        translation.said["micro_batch"] = Said(sizes.micro, f"deepspeed.{NAMES[0]} on {ranks} ranks")


def combined(file: BatchSizes, given: Mapping[str, Any], sequence_length: int) -> BatchSizes:
    """The file's sizes completed by the user's settings, and by the defaults where the file says "auto" and nothing else does."""
    tokens, micro = _whole(given.get("batch_tokens"), None), _whole(given.get("micro_batch"), None)
    train = file.train or (tokens // sequence_length if tokens else None)
    micro = file.micro or micro
    open_sizes = [train, micro, file.accumulation].count(None)
    if train is None and NAMES[0] in file.automatic and open_sizes > 1:
        train = DEFAULT_BATCH_TOKENS // sequence_length
    return BatchSizes(train, micro, file.accumulation, file.automatic)


def _whole(value: Any, default: int | None) -> int | None:
    if value is None:
        return default
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
