"""What the properties of a resource may hold: checked by name before anything is created, converted when it is.

CloudFormation takes "3" for 3 and "true" for true, and the APIs do not; so each kind of value knows how to find fault with an
unresolved template and how to convert a resolved one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


def is_intrinsic(node: Any) -> bool:
    """True for ``{"Ref": ...}`` and ``{"Fn::...": ...}``, whose value is known only later."""
    return isinstance(node, dict) and len(node) == 1 and next(iter(node)).startswith(("Ref", "Fn::"))


class Kind:
    """A kind of value."""

    def faults(self, node: Any, path: str) -> Iterator[str]:
        """Sentences about what is wrong with an unresolved value; both branches of ``Fn::If`` are looked at."""
        if is_intrinsic(node):
            branches = node.get("Fn::If")
            for branch in branches[1:] if isinstance(branches, list) else ():
                yield from self.faults(branch, path)
        else:
            yield from self._own_faults(node, path)

    def _own_faults(self, node: Any, path: str) -> Iterator[str]:
        if isinstance(node, (dict, list)):
            yield f"{path} must be a single value, not {type(node).__name__}"

    def convert(self, value: Any, path: str) -> Any:
        """The resolved value in the type that the API wants; raises ``ValueError`` when it has no such form."""
        raise NotImplementedError


class Text(Kind):
    """A string; numbers and booleans are written as CloudFormation writes them."""

    def convert(self, value: Any, path: str) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, (dict, list)):
            raise ValueError(f"{path} must be a string, not {json.dumps(value)}")
        return str(value)


class Whole(Kind):
    """An integer."""

    def convert(self, value: Any, path: str) -> int:
        try:
            return int(value)
        except (TypeError, ValueError):
            raise ValueError(f"{path} must be an integer, not {value!r}") from None


class Number(Kind):
    """A number with a fraction."""

    def convert(self, value: Any, path: str) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{path} must be a number, not {value!r}") from None


class Flag(Kind):
    """True or false."""

    def convert(self, value: Any, path: str) -> bool:
        text = str(value).lower()
        if text not in ("true", "false"):
            raise ValueError(f"{path} must be true or false, not {value!r}")
        return text == "true"


class Document(Kind):
    """Free JSON, such as a policy; nothing in it is checked or converted."""

    def _own_faults(self, node: Any, path: str) -> Iterator[str]:
        return iter(())

    def convert(self, value: Any, path: str) -> Any:
        return value


@dataclass(frozen=True)
class Many(Kind):
    """A list of one kind."""

    item: Kind

    def _own_faults(self, node: Any, path: str) -> Iterator[str]:
        if not isinstance(node, list):
            yield f"{path} must be a list"
            return
        for index, each in enumerate(node):
            yield from self.item.faults(each, f"{path}[{index}]")

    def convert(self, value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            raise ValueError(f"{path} must be a list, not {value!r}")
        return [self.item.convert(each, f"{path}[{index}]") for index, each in enumerate(value)]


@dataclass(frozen=True)
class Named(Kind):
    """An object with free keys and values of one kind."""

    item: Kind

    def _own_faults(self, node: Any, path: str) -> Iterator[str]:
        if not isinstance(node, dict):
            yield f"{path} must be an object"
            return
        for key, each in node.items():
            yield from self.item.faults(each, f"{path}.{key}")

    def convert(self, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(f"{path} must be an object, not {value!r}")
        return {key: self.item.convert(each, f"{path}.{key}") for key, each in value.items()}


@dataclass(frozen=True)
class Record(Kind):
    """An object with known keys."""

    fields: Mapping[str, Kind]
    required: frozenset[str] = field(default=frozenset())

    def _own_faults(self, node: Any, path: str) -> Iterator[str]:
        if not isinstance(node, dict):
            yield f"{path} must be an object"
            return
        for key, each in node.items():
            if key not in self.fields:
                yield f"property {path}.{key} is not emulated"
            else:
                yield from self.fields[key].faults(each, f"{path}.{key}")
        for key in sorted(self.required - node.keys()):
            yield f"{path} lacks the required property {key}"

    def convert(self, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(f"{path} must be an object, not {value!r}")
        for key in value:
            if key not in self.fields:
                raise ValueError(f"property {path}.{key} is not emulated")
        for key in sorted(self.required - value.keys()):
            raise ValueError(f"{path} lacks the required property {key}")
        return {key: self.fields[key].convert(each, f"{path}.{key}") for key, each in value.items()}


TEXT, WHOLE, NUMBER, FLAG, DOCUMENT = Text(), Whole(), Number(), Flag(), Document()
TEXTS = Many(TEXT)


def record(*, required: str = "", **fields: Kind) -> Record:
    """A record; ``required`` lists the keys that must be there, separated by blanks."""
    return Record(fields, frozenset(required.split()))


TAGS = Many(record(required="Key Value", Key=TEXT, Value=TEXT))
