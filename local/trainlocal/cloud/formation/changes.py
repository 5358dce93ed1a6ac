"""What a change set would do: which resources it adds, changes, replaces and removes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainlocal.cloud.formation.intrinsics import NO_VALUE, UNKNOWN, Evaluator
from trainlocal.cloud.formation.stack import Resource
from trainlocal.cloud.formation.surroundings import provider_for
from trainlocal.cloud.formation.template import Declaration


@dataclass
class Outlook:
    """The surroundings of a template that is only looked at: what a change would make or replace is unknown."""

    actual: Any
    existing: Mapping[str, Resource]
    unknown: set[str] = field(default_factory=set)
    changing: dict[str, frozenset[str]] = field(default_factory=dict)

    def reference(self, logical: str) -> Any:
        """The ``Ref`` of a resource that stays, or ``UNKNOWN``."""
        return UNKNOWN if self._open(logical) else self.actual.reference(logical)

    def attribute(self, logical: str, name: str) -> Any:
        """The ``Fn::GetAtt`` of a resource that stays, or ``UNKNOWN``."""
        changing = name in self.changing.get(logical, ())
        return UNKNOWN if changing or self._open(logical) else self.actual.attribute(logical, name)

    def imported(self, name: str) -> str:
        """The value of an export."""
        value: str = self.actual.imported(name)
        return value

    def zones(self, region: str) -> list[str]:
        """The zones of a region."""
        zones: list[str] = self.actual.zones(region)
        return zones

    def parameter_of_store(self, name: str) -> str:
        """The value of an SSM parameter."""
        value: str = self.actual.parameter_of_store(name)
        return value

    def _open(self, logical: str) -> bool:
        return logical in self.unknown or logical not in self.existing


def plan_changes(
    order: list[Declaration], existing: Mapping[str, Resource], evaluator: Evaluator, outlook: Outlook
) -> list[dict[str, Any]]:
    """The changes in the API's form; ``order`` holds the active declarations, each after what it needs."""
    changes = []
    for declaration in order:
        resource = existing.get(declaration.logical)
        if resource is None:
            changes.append(_change("Add", declaration.logical, declaration.type))
            continue
        properties = evaluator.value(declaration.properties)
        names = changed_names(resource, declaration, properties)
        if not names:
            continue
        replacement = _replacement(resource, declaration, properties, names)
        if replacement != "False":
            outlook.unknown.add(declaration.logical)
        outlook.changing[declaration.logical] = provider_for(declaration.type).volatile
        changes.append(
            _change(
                "Modify",
                declaration.logical,
                declaration.type,
                PhysicalResourceId=resource.physical_id,
                Replacement=replacement,
                Scope=["Properties"],
                Details=[_detail(name, replacement) for name in sorted(names)],
            )
        )
    kept = {declaration.logical for declaration in order}
    for logical, resource in reversed(list(existing.items())):
        if logical not in kept:
            action = "Retain" if resource.deletion_policy == "Retain" else "Delete"
            changes.append(
                _change("Remove", logical, resource.type, PhysicalResourceId=resource.physical_id, PolicyAction=action)
            )
    return changes


def changed_names(resource: Resource, declaration: Declaration, properties: Mapping[str, Any]) -> set[str]:
    """The properties in which a declaration differs from a resource; all of them when its type changed."""
    if resource.type != declaration.type:
        return {"Type"}
    names = resource.properties.keys() | properties.keys()
    return {name for name in names if not _same(resource.properties.get(name, NO_VALUE), properties.get(name, NO_VALUE))}


def _same(before: Any, after: Any) -> bool:
    if after is UNKNOWN:
        return False
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(_same(before[key], after[key]) for key in before)
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_same, before, after))
    return bool(before == after)


def _replacement(resource: Resource, declaration: Declaration, properties: Mapping[str, Any], names: set[str]) -> str:
    provider = provider_for(declaration.type)
    if "Type" in names or provider.needs_replacement(resource.properties, properties):
        certain = "Type" in names or not any(properties.get(name) is UNKNOWN for name in names & provider.replacing)
        return "True" if certain else "Conditional"
    return "False"


def _detail(name: str, replacement: str) -> dict[str, Any]:
    recreation = {"True": "Always", "Conditional": "Conditionally", "False": "Never"}[replacement]
    return {
        "Target": {"Attribute": "Properties", "Name": name, "RequiresRecreation": recreation},
        "Evaluation": "Static",
        "ChangeSource": "DirectModification",
    }


def _change(action: str, logical: str, type: str, **more: Any) -> dict[str, Any]:
    content = {"Action": action, "LogicalResourceId": logical, "ResourceType": type, **more}
    return {"Type": "Resource", "ResourceChange": content}
