"""Rules: what can go wrong, as pure functions from facts to findings.

A rule takes one frozen dataclass of plain values, its facts. A value that is not known at synth, because it is an
unresolved token, is None there, and a rule that needs it then finds nothing. Nothing here knows the CDK: the constructs
gather facts and report findings (`traincluster.rules.report`), and tests and the command line call the same rules.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar

from traincluster.rules.finding import Finding, Level

RuleFunction = TypeVar("RuleFunction", bound=Callable[[Any], Iterable[Finding]])


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A registered rule."""

    name: str
    summary: str
    """What it is about, in one line."""
    source: str
    """Where AWS, or experience, says so."""
    levels: tuple[Level, ...]
    """The levels that its findings can have."""
    facts: type
    """The dataclass that it reads."""
    check: Callable[[Any], Iterable[Finding]]

    @property
    def can_be_acknowledged(self) -> bool:
        return "warning" in self.levels


_rules: dict[str, Rule] = {}


def rule(
    name: str, *, summary: str, source: str, levels: tuple[Level, ...] = ("error",)
) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function as a rule. Its one parameter is annotated with the facts that it reads.

    Example:
        >>> @rule("fsx-in-one-zone", summary="...", source="...", levels=("warning",))      # doctest: +SKIP
        ... def fsx_in_one_zone(facts: LustreFacts) -> Iterator[Finding]:
        ...     if facts.zone is not None and facts.zone != facts.nodes_zone:
        ...         yield Finding("warning", "fsx-in-one-zone", "...", "...")
    """

    def register(function: RuleFunction) -> RuleFunction:
        hints = typing.get_type_hints(function)
        (facts,) = [hint for parameter, hint in hints.items() if parameter != "return"]
        assert isinstance(facts, type) and is_dataclass(facts), f"the rule {name} has no dataclass of facts as its one parameter"
        assert name not in _rules, f"two rules are called {name}"
        _rules[name] = Rule(name=name, summary=summary, source=source, levels=levels, facts=facts, check=function)
        return function

    return register


def check(facts: Any) -> tuple[Finding, ...]:
    """What all rules that read facts of this type find in them, in the order of the rules."""
    findings = []
    for each in _rules.values():
        if each.facts is not type(facts):
            continue
        for finding in each.check(facts):
            assert finding.rule == each.name, f"the rule {each.name} calls its finding {finding.rule}"
            assert finding.level in each.levels, f"the rule {each.name} does not declare the level {finding.level}"
            findings.append(finding)
    return tuple(findings)


def rules() -> tuple[Rule, ...]:
    """Every rule, by name."""
    return tuple(_rules[name] for name in sorted(_rules))


def find_rule(name: str) -> Rule:
    """The rule of a name.

    Raises:
        ValueError: there is none; the message names the nearest.
    """
    if name in _rules:
        return _rules[name]
    near = difflib.get_close_matches(name, _rules, n=1, cutoff=0.3)
    hint = f"Did you mean {near[0]!r}?" if near else "`traincluster rules` lists them all."
    raise ValueError(f"There is no rule {name!r}. {hint}")
