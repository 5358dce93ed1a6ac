"""Template parameters: defaults, constraints, previous values, values from SSM."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainlocal.cloud.formation.faults import FormationError

_STORED = re.compile(r"AWS::SSM::Parameter::Value<(.+)>")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter's value: as it was given, and as expressions see it (a list for list types, the value of an SSM name)."""

    given: str
    value: Any
    hidden: bool = False
    stored: bool = False


def resolve_parameters(
    declared: Mapping[str, Any],
    requested: list[dict[str, Any]],
    previous: Mapping[str, Parameter],
    read_store: Callable[[str], str],
) -> dict[str, Parameter]:
    """The values of all declared parameters.

    ``requested`` has the API's form (ParameterKey, ParameterValue, UsePreviousValue); ``previous`` are the values of the stack
    as it is; ``read_store`` reads an SSM parameter. Raises ``FormationError`` for a value that the declaration does not allow.
    """
    by_key = {each["ParameterKey"]: each for each in requested}
    for key in by_key:
        if key not in declared:
            raise FormationError(f"Parameters: [{key}] do not exist in the template")
    values: dict[str, Parameter] = {}
    missing = []
    for key, declaration in declared.items():
        given = _given(key, by_key.get(key), declaration, previous)
        if given is None:
            missing.append(key)
        else:
            values[key] = _parameter(key, given, declaration, read_store)
    if missing:
        raise FormationError(f"Parameters: [{', '.join(missing)}] must have values")
    return values


def _given(
    key: str, request: dict[str, Any] | None, declaration: Mapping[str, Any], previous: Mapping[str, Parameter]
) -> str | None:
    if request is not None and str(request.get("UsePreviousValue", "false")).lower() == "true":
        if key not in previous:
            raise FormationError(f"Parameter {key} has no previous value to use")
        return previous[key].given
    if request is not None and "ParameterValue" in request:
        return str(request["ParameterValue"])
    default = declaration.get("Default")
    if default is None:
        return None
    return str(default).lower() if isinstance(default, bool) else str(default)


def _parameter(key: str, given: str, declaration: Mapping[str, Any], read_store: Callable[[str], str]) -> Parameter:
    kind = declaration.get("Type", "String")
    _check(key, given, kind, declaration)
    stored = _STORED.fullmatch(kind)
    text = read_store(given) if stored else given
    if stored:
        kind = stored[1]
    hidden = str(declaration.get("NoEcho", "false")).lower() == "true"
    return Parameter(given=given, value=_typed(key, text, kind), hidden=hidden, stored=stored is not None)


def _typed(key: str, text: str, kind: str) -> Any:
    if kind == "CommaDelimitedList" or kind.startswith("List<"):
        return [part.strip() for part in text.split(",")]
    if kind == "Number" and not re.fullmatch(r"[-+]?\d+(\.\d+)?([eE][-+]?\d+)?", text):
        raise FormationError(f"Parameter '{key}' must be a number, not {text!r}")
    return text


def _check(key: str, given: str, kind: str, declaration: Mapping[str, Any]) -> None:
    """Raises when the given text breaks one of the declared constraints."""
    allowed = declaration.get("AllowedValues")
    if allowed is not None and given not in [str(each).lower() if isinstance(each, bool) else str(each) for each in allowed]:
        _refuse(key, declaration, f"must be one of the allowed values: [{', '.join(map(str, allowed))}]")
    pattern = declaration.get("AllowedPattern")
    if pattern is not None and not re.fullmatch(str(pattern), given):
        _refuse(key, declaration, f"must match pattern {pattern}")
    if len(given) < int(declaration.get("MinLength", 0)):
        _refuse(key, declaration, f"must contain at least {declaration['MinLength']} characters")
    if len(given) > int(declaration.get("MaxLength", len(given))):
        _refuse(key, declaration, f"must contain at most {declaration['MaxLength']} characters")
    if kind == "Number" and "MinValue" in declaration and float(given) < float(declaration["MinValue"]):
        _refuse(key, declaration, f"must be a number not less than {declaration['MinValue']}")
    if kind == "Number" and "MaxValue" in declaration and float(given) > float(declaration["MaxValue"]):
        _refuse(key, declaration, f"must be a number not greater than {declaration['MaxValue']}")


def _refuse(key: str, declaration: Mapping[str, Any], reason: str) -> None:
    raise FormationError(f"Parameter '{key}' {declaration.get('ConstraintDescription') or reason}")
