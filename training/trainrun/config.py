"""Typed configuration: frozen dataclasses <- a mapping (YAML, JSON) <- ``--a.b=c``.

Standard library only, because both sides of a run read it: the CDK side at synth and the node at start.
An unknown key is an error that names the nearest one, a value of the wrong type an error that names the
allowed type, and all errors of one document are reported together.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")


class ConfigError(ValueError):
    """Everything that is wrong with one configuration, one sentence a line."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def from_mapping(cls: type[T], mapping: Mapping[str, Any], *, source: str = "the configuration") -> T:
    """Build the dataclass ``cls`` from ``mapping``; nested dataclasses from nested mappings.

    Args:
        cls: a dataclass type.
        mapping: keys are field names. A missing key takes the field's default.
        source: what the mapping was read from, for the error message.

    Raises:
        ConfigError: unknown keys, missing keys and values of the wrong type, all together.
    """
    problems: list[str] = []
    value = _build(cls, mapping, path="", source=source, problems=problems)
    if problems:
        raise ConfigError(problems)
    assert isinstance(value, cls)
    return value


def to_mapping(config: Any) -> dict[str, Any]:
    """The JSON-able mapping of a dataclass: ``from_mapping(type(x), to_mapping(x)) == x``."""
    mapping: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return mapping


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``over`` laid on top; mappings merge key by key, all else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        both_mappings = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both_mappings else value
    return merged


def overrides_to_mapping(arguments: Iterable[str]) -> dict[str, Any]:
    """Turn ``--optimizer.learning_rate=3e-4`` arguments into a nested mapping.

    Values are read as JSON where they are JSON (numbers, true, false, null, lists) and as text otherwise.

    Raises:
        ConfigError: an argument that is not ``--name=value``, or a name with both a value and names below it.
    """
    mapping: dict[str, Any] = {}
    problems = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        name, equals, text = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and name and not equals and waiting and not waiting[0].startswith("--"):
            value = waiting.pop(0)
            problems.append(f"'{argument} {value}' lacks an equals sign. Write {argument}={value}.")
            continue
        if not argument.startswith("--") or not equals or not name:
            problems.append(f"{argument!r} is not an override. Write --name=value, for example --steps=500.")
            continue
        nested: Any = parse_scalar(text)
        for key in reversed(name.split(".")):
            nested = {key: nested}
        if both := _value_and_section(mapping, nested):
            problems.append(
                f"{argument!r} and another argument give {both} both as a whole and in parts, of which only the later would "
                "count. Remove one of them."
            )
        mapping = merge(mapping, nested)
    if problems:
        raise ConfigError(problems)
    return mapping


def _value_and_section(one: Mapping[str, Any], other: Mapping[str, Any], path: str = "") -> str | None:
    """The dotted name that is a mapping in one of two and something else in the other, None when there is none."""
    for key in one.keys() & other.keys():
        values = one[key], other[key]
        mappings = [isinstance(value, Mapping) for value in values]
        if all(mappings) and (found := _value_and_section(*values, f"{path}{key}.")):
            return found
        if any(mappings) and not all(mappings):
            return f"{path}{key}"
    return None


def parse_scalar(text: str) -> Any:
    """A value given as text on a command line: JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def nearest(name: str, allowed: Iterable[str]) -> str:
    """' Did you mean 'x'?' when one of ``allowed`` is close to ``name``, else the whole list."""
    choices = sorted(allowed)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Allowed: {', '.join(choices)}."


def _build(cls: Any, mapping: Any, *, path: str, source: str, problems: list[str]) -> Any:
    if not isinstance(mapping, Mapping):
        where = path or source
        problems.append(f"{where} must be a mapping of {', '.join(f.name for f in dataclasses.fields(cls))}, not {mapping!r}.")
        return None
    hints = _hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    values = {}
    before = len(problems)
    for key, value in mapping.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            problems.append(f"Unknown setting {where!r} in {source}. {nearest(str(key), fields)}")
            continue
        values[key] = _convert(hints[key], value, path=where, source=source, problems=problems)
    for name, field in fields.items():
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in mapping and not has_default:
            problems.append(f"Setting {(path + '.' if path else '') + name!r} is missing in {source} and has no default.")
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except ConfigError as error:
        problems.extend(f"{path}: {p}" if path else p for p in error.problems)
    except ValueError as error:
        problems.append(f"{path}: {error}" if path else str(error))
    return None


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    """The types of a dataclass's fields; cached, for a COMMIT.json has many thousands of one class."""
    return typing.get_type_hints(cls)


def _convert(hint: Any, value: Any, *, path: str, source: str, problems: list[str]) -> Any:
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, path=path, source=source, problems=problems)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _convert_optional(args, value, path=path, source=source, problems=problems)
    if origin is Literal:
        if value in args and type(value) in {type(a) for a in args}:
            return value
        problems.append(f"{path} is {value!r}. Allowed: {', '.join(map(repr, args))}.")
        return None
    if origin is tuple:
        return _convert_tuple(args, value, path=path, source=source, problems=problems)
    if origin in (dict, Mapping) or getattr(origin, "__name__", "") == "Mapping":
        if isinstance(value, Mapping):
            return {str(k): _convert(args[1], v, path=f"{path}.{k}", source=source, problems=problems) for k, v in value.items()}
        problems.append(f"{path} must be a mapping, not {value!r}.")
        return None
    return _convert_scalar(hint, value, path=path, problems=problems)


def _convert_optional(args: tuple[Any, ...], value: Any, *, path: str, source: str, problems: list[str]) -> Any:
    if value is None and type(None) in args:
        return None
    choices = [a for a in args if a is not type(None)]
    attempts = []
    for choice in choices:
        attempt: list[str] = []
        converted = _convert(choice, value, path=path, source=source, problems=attempt)
        if not attempt:
            return converted
        attempts.append(attempt)
    problems.extend(attempts[0] if len(attempts) == 1 else [" Or: ".join(" ".join(a) for a in attempts)])
    return None


def _convert_tuple(args: tuple[Any, ...], value: Any, *, path: str, source: str, problems: list[str]) -> Any:
    variadic = len(args) == 2 and args[1] is Ellipsis
    if not isinstance(value, (list, tuple)) or (not variadic and len(value) != len(args)):
        wanted = "a list" if variadic else f"a list of {len(args)} values"
        problems.append(f"{path} must be {wanted}, not {value!r}.")
        return None
    hints = [args[0]] * len(value) if variadic else args
    return tuple(
        _convert(hint, item, path=f"{path}[{i}]", source=source, problems=problems)
        for i, (hint, item) in enumerate(zip(hints, value, strict=True))
    )


def _convert_scalar(hint: type, value: Any, *, path: str, problems: list[str]) -> Any:
    if hint is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:  # YAML 1.1 reads 3e-4 as text
            return float(value)
        except (ValueError, OverflowError):
            pass
    elif hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    name = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(hint, hint.__name__)
    problems.append(f"{path} must be {name}, not {value!r}.")
    return None
