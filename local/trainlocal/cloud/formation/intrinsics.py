"""Intrinsic functions, pseudo parameters, conditions and dynamic references."""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainlocal.cloud.formation.faults import FormationError

_SUBSTITUTION = re.compile(r"\$\{([^}]*)\}")
_DYNAMIC = re.compile(r"\{\{resolve:([a-z-]+):([^}]+)\}\}")


class _Marker:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


NO_VALUE = _Marker("AWS::NoValue")
"""What ``Ref: AWS::NoValue`` gives; the property or list item that holds it goes."""
UNKNOWN = _Marker("(known after apply)")
"""The value of something that is yet to be made, while a change is only looked at."""


class Surroundings(Protocol):
    """What a template's values depend on besides the template: the account, and the resources made so far."""

    def reference(self, logical: str) -> Any:
        """The ``Ref`` of a resource."""

    def attribute(self, logical: str, name: str) -> Any:
        """The ``Fn::GetAtt`` of a resource."""

    def imported(self, name: str) -> str:
        """The value of an export."""

    def zones(self, region: str) -> list[str]:
        """The availability zones of a region."""

    def parameter_of_store(self, name: str) -> str:
        """The value of an SSM parameter."""


@dataclass(kw_only=True)
class Evaluator:
    """Gives the values of one template's expressions."""

    surroundings: Surroundings
    pseudo: Mapping[str, Any]
    parameters: Mapping[str, Any]
    mappings: Mapping[str, Any] = field(default_factory=dict)
    conditions: Mapping[str, Any] = field(default_factory=dict)
    resources: frozenset[str] = frozenset()

    def value(self, node: Any) -> Any:
        """The value of an expression; ``NO_VALUE`` for a top-level reference to nothing."""
        if isinstance(node, dict):
            if len(node) == 1:
                name, argument = next(iter(node.items()))
                if name == "Ref":
                    return self._ref(argument)
                if name.startswith("Fn::"):
                    return self._call(name, argument)
            members = {key: self.value(each) for key, each in node.items()}
            return {key: each for key, each in members.items() if each is not NO_VALUE}
        if isinstance(node, list):
            return [each for each in map(self.value, node) if each is not NO_VALUE]
        return self._dynamic(node) if isinstance(node, str) else node

    def condition(self, name: str) -> bool:
        """The truth of a named condition."""
        if name not in self.conditions:
            raise FormationError(f"Template validation error: unresolved condition {name}")
        return self.truth(self.conditions[name])

    def truth(self, node: Any) -> bool:
        """The truth of a condition expression."""
        if isinstance(node, dict) and len(node) == 1:
            name, argument = next(iter(node.items()))
            if name == "Condition":
                return self.condition(argument)
            if name in _LOGIC:
                return _LOGIC[name](self, argument)
        value = self.value(node)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise FormationError(f"Template error: a condition is neither true nor false: {node!r}")
        return value

    def _ref(self, name: Any) -> Any:
        if name == "AWS::NoValue":
            return NO_VALUE
        if name in self.pseudo:
            return self.pseudo[name]
        if name in self.parameters:
            return self.parameters[name]
        if name in self.resources:
            return self.surroundings.reference(name)
        raise FormationError(f"Template format error: Unresolved resource dependencies [{name}]")

    def _call(self, name: str, argument: Any) -> Any:
        if name in _LOGIC:
            return _LOGIC[name](self, argument)
        if name not in _FUNCTIONS:
            raise FormationError(f"Template error: the function {name} is not emulated")
        return _FUNCTIONS[name](self, argument)

    def _dynamic(self, text: str) -> Any:
        def resolve(match: re.Match[str]) -> str:
            service, key = match.groups()
            if service != "ssm":
                raise FormationError(f"the dynamic reference {{{{resolve:{service}:...}}}} is not emulated (ssm is)")
            return self.surroundings.parameter_of_store(key)

        return _DYNAMIC.sub(resolve, text) if "{{resolve:" in text else text

    def _arguments(self, name: str, argument: Any, counts: tuple[int, ...]) -> list[Any]:
        if not isinstance(argument, list) or len(argument) not in counts:
            raise FormationError(f"Template error: {name} takes {' or '.join(map(str, counts))} arguments")
        return argument

    # The functions, in alphabetical order.

    def _base64(self, argument: Any) -> Any:
        text = self.value(argument)
        return text if text is UNKNOWN else base64.b64encode(text_of(text).encode()).decode()

    def _cidr(self, argument: Any) -> Any:
        block, count, *bits = map(self.value, self._arguments("Fn::Cidr", argument, (2, 3)))
        if block is UNKNOWN:
            return UNKNOWN
        network = ipaddress.ip_network(block)
        prefix = network.max_prefixlen - int(bits[0] if bits else 8)
        subnets = network.subnets(new_prefix=prefix)
        made = [str(subnet) for subnet, _ in zip(subnets, range(int(count)), strict=False)]
        if len(made) < int(count):
            raise FormationError(f"Template error: Fn::Cidr: {block} has fewer than {count} blocks of /{prefix}")
        return made

    def _find_in_map(self, argument: Any) -> Any:
        keys = [self.value(key) for key in self._arguments("Fn::FindInMap", argument, (3, 4))[:3]]
        found: Any = self.mappings
        for key in keys:
            if not isinstance(found, dict) or text_of(key) not in found:
                if len(argument) == 4 and "DefaultValue" in argument[3]:
                    return self.value(argument[3]["DefaultValue"])
                raise FormationError(f"Template error: Unable to get mapping for {'::'.join(map(str, keys))}")
            found = found[text_of(key)]
        return found

    def _get_att(self, argument: Any) -> Any:
        logical, name = argument.split(".", 1) if isinstance(argument, str) else argument
        if logical not in self.resources:
            raise FormationError(f"Template format error: Unresolved resource dependencies [{logical}]")
        return self.surroundings.attribute(logical, self.value(name))

    def _get_azs(self, argument: Any) -> list[str]:
        return self.surroundings.zones(self.value(argument) or self.pseudo["AWS::Region"])

    def _if(self, argument: Any) -> Any:
        condition, yes, no = self._arguments("Fn::If", argument, (3,))
        return self.value(yes if self.condition(condition) else no)

    def _import_value(self, argument: Any) -> Any:
        return self.surroundings.imported(text_of(self.value(argument)))

    def _join(self, argument: Any) -> Any:
        separator, parts = self._arguments("Fn::Join", argument, (2,))
        values = self.value(parts)
        if values is UNKNOWN or (isinstance(values, list) and UNKNOWN in values):
            return UNKNOWN
        if not isinstance(values, list):
            raise FormationError(f"Template error: Fn::Join needs a list, not {values!r}")
        return text_of(separator).join(map(text_of, values))

    def _select(self, argument: Any) -> Any:
        index, choices = (self.value(each) for each in self._arguments("Fn::Select", argument, (2,)))
        if choices is UNKNOWN:
            return UNKNOWN
        if not isinstance(choices, list) or not 0 <= int(index) < len(choices):
            raise FormationError(f"Template error: Fn::Select cannot select nonexistent value at index {index}")
        return choices[int(index)]

    def _split(self, argument: Any) -> Any:
        separator, text = (self.value(each) for each in self._arguments("Fn::Split", argument, (2,)))
        return UNKNOWN if text is UNKNOWN else text_of(text).split(separator)

    def _sub(self, argument: Any) -> Any:
        text, own = (argument, {}) if isinstance(argument, str) else self._arguments("Fn::Sub", argument, (2,))
        values: dict[str, Any] = {}
        for name in substitutions(text):
            if name in own:
                values[name] = self.value(own[name])
            else:
                values[name] = self._get_att(name) if "." in name else self._ref(name)
        if UNKNOWN in values.values():
            return UNKNOWN

        def replace(match: re.Match[str]) -> str:
            name = match[1]
            return f"${{{name[1:]}}}" if name.startswith("!") else text_of(values[name.strip()])

        return self._dynamic(_SUBSTITUTION.sub(replace, text))

    # Logic, in conditions and in rules.

    def _and(self, argument: Any) -> bool:
        return all(self.truth(each) for each in argument)

    def _contains(self, argument: Any) -> bool:
        choices, wanted = (self.value(each) for each in self._arguments("Fn::Contains", argument, (2,)))
        return text_of(wanted) in map(text_of, choices)

    def _each_member_equals(self, argument: Any) -> bool:
        members, wanted = (self.value(each) for each in self._arguments("Fn::EachMemberEquals", argument, (2,)))
        return all(text_of(member) == text_of(wanted) for member in members)

    def _each_member_in(self, argument: Any) -> bool:
        members, choices = (self.value(each) for each in self._arguments("Fn::EachMemberIn", argument, (2,)))
        return set(map(text_of, members)) <= set(map(text_of, choices))

    def _equals(self, argument: Any) -> bool:
        left, right = (self.value(each) for each in self._arguments("Fn::Equals", argument, (2,)))
        if isinstance(left, (list, dict)) or isinstance(right, (list, dict)):
            return bool(left == right)
        return text_of(left) == text_of(right)

    def _not(self, argument: Any) -> bool:
        return not self.truth(self._arguments("Fn::Not", argument, (1,))[0])

    def _or(self, argument: Any) -> bool:
        return any(self.truth(each) for each in argument)


_FUNCTIONS: dict[str, Callable[[Evaluator, Any], Any]] = {
    "Fn::Base64": Evaluator._base64,
    "Fn::Cidr": Evaluator._cidr,
    "Fn::FindInMap": Evaluator._find_in_map,
    "Fn::GetAtt": Evaluator._get_att,
    "Fn::GetAZs": Evaluator._get_azs,
    "Fn::If": Evaluator._if,
    "Fn::ImportValue": Evaluator._import_value,
    "Fn::Join": Evaluator._join,
    "Fn::Select": Evaluator._select,
    "Fn::Split": Evaluator._split,
    "Fn::Sub": Evaluator._sub,
}
_LOGIC: dict[str, Callable[[Evaluator, Any], bool]] = {
    "Fn::And": Evaluator._and,
    "Fn::Contains": Evaluator._contains,
    "Fn::EachMemberEquals": Evaluator._each_member_equals,
    "Fn::EachMemberIn": Evaluator._each_member_in,
    "Fn::Equals": Evaluator._equals,
    "Fn::Not": Evaluator._not,
    "Fn::Or": Evaluator._or,
}


def text_of(value: Any) -> str:
    """A scalar as CloudFormation writes it into a string."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (dict, list)):
        raise FormationError(f"Template error: a string is needed where {value!r} stands")
    return str(value)


def substitutions(text: str) -> list[str]:
    """The names that ``Fn::Sub`` puts in, literals (``${!x}``) left out."""
    return [name.strip() for name in _SUBSTITUTION.findall(text) if not name.startswith("!")]


def references(node: Any) -> Iterator[tuple[str, str | None]]:
    """Every (name, attribute) that an expression refers to, in both branches of each ``Fn::If``; attribute None for Ref."""
    if isinstance(node, list):
        for each in node:
            yield from references(each)
    if not isinstance(node, dict):
        return
    if len(node) == 1:
        name, argument = next(iter(node.items()))
        if name == "Ref":
            yield argument, None
            return
        if name == "Fn::GetAtt":
            logical, attribute = argument.split(".", 1) if isinstance(argument, str) else argument
            yield logical, attribute
            return
        if name == "Fn::Sub":
            text, own = (argument, {}) if isinstance(argument, str) else argument
            for substituted in substitutions(text):
                if substituted not in own:
                    logical, _, attribute = substituted.partition(".")
                    yield logical, attribute or None
            yield from references(list(own.values()))
            return
    for each in node.values():
        yield from references(each)
