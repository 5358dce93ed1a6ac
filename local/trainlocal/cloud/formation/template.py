"""Templates: read from YAML or JSON, checked for form, and given names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import yaml

from trainlocal.cloud.formation.faults import FormationError

SECTIONS = frozenset(
    {
        "AWSTemplateFormatVersion",
        "Conditions",
        "Description",
        "Mappings",
        "Metadata",
        "Outputs",
        "Parameters",
        "Resources",
        "Rules",
    }
)
RESOURCE_KEYS = frozenset(
    {
        "Condition",
        "CreationPolicy",
        "DeletionPolicy",
        "DependsOn",
        "Metadata",
        "Properties",
        "Type",
        "UpdatePolicy",
        "UpdateReplacePolicy",
    }
)
POLICIES = frozenset({"Delete", "Retain", "RetainExceptOnCreate", "Snapshot"})


# YAML as CloudFormation reads it: with short tags for intrinsic functions, and without dates. The fast loader, if it is there.
_Loader: Any = type("_Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def _intrinsic(loader: Any, suffix: str, node: yaml.Node) -> dict[str, Any]:
    if isinstance(node, yaml.ScalarNode):
        value: Any = loader.construct_scalar(node)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        value = loader.construct_mapping(node, deep=True)
    if suffix == "GetAtt" and isinstance(value, str):
        value = value.split(".", 1)
    return {suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}": value}


_Loader.add_multi_constructor("!", _intrinsic)


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """One resource as the template declares it."""

    logical: str
    type: str
    properties: dict[str, Any]
    depends_on: tuple[str, ...] = ()
    condition: str | None = None
    deletion_policy: Any = "Delete"
    update_replace_policy: Any = "Delete"
    update_policy: Mapping[str, Any] = field(default_factory=dict)
    creation_policy: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Template:
    """A template whose form is known to be good."""

    body: str
    document: Mapping[str, Any]

    def section(self, name: str) -> dict[str, Any]:
        """One of the sections that map names to things; empty when the template lacks it."""
        content: dict[str, Any] = self.document.get(name) or {}
        return content

    @property
    def description(self) -> str | None:
        """The template's description."""
        return self.document.get("Description")

    @cached_property
    def declarations(self) -> dict[str, Declaration]:
        """The resources by logical id, those with unmet conditions included."""
        return {logical: _declaration(logical, content) for logical, content in self.section("Resources").items()}


def read_template(body: str) -> Template:
    """Reads a template and checks its form; raises ``FormationError`` in CloudFormation's words."""
    if not body.strip():
        raise FormationError("Template format error: the template is empty")
    try:
        document = json.loads(body) if body.lstrip().startswith("{") else yaml.load(body, Loader=_Loader)
    except (ValueError, yaml.YAMLError) as error:
        raise FormationError(f"Template format error: neither well-formed JSON nor YAML. {error}") from error
    if not isinstance(document, dict):
        raise FormationError("Template format error: the template is not an object")
    for name in document:
        if name not in SECTIONS:
            raise FormationError(f"Template format error: the section {name} is not emulated")
    if not isinstance(document.get("Resources"), dict) or not document["Resources"]:
        raise FormationError("Template format error: At least one Resources member must be defined.")
    template = Template(body, document)
    _ = template.declarations  # their form is checked by reading them
    return template


def _declaration(logical: str, content: Any) -> Declaration:
    where = f"Template format error: resource {logical}"
    if not logical.isalnum():
        raise FormationError(f"{where}: logical ids must be alphanumeric")
    if not isinstance(content, dict) or not isinstance(content.get("Type"), str):
        raise FormationError(f"{where} has no Type")
    for key in content:
        if key not in RESOURCE_KEYS:
            raise FormationError(f"{where} ({content['Type']}): the attribute {key} is not emulated")
    for key in ("DeletionPolicy", "UpdateReplacePolicy"):
        if isinstance(content.get(key), str) and content[key] not in POLICIES:
            raise FormationError(f"{where}: unrecognized {key} {content[key]}")
    depends_on = content.get("DependsOn", [])
    return Declaration(
        logical=logical,
        type=content["Type"],
        properties=content.get("Properties") or {},
        depends_on=tuple([depends_on] if isinstance(depends_on, str) else depends_on),
        condition=content.get("Condition"),
        deletion_policy=content.get("DeletionPolicy", "Delete"),
        update_replace_policy=content.get("UpdateReplacePolicy", "Delete"),
        update_policy=content.get("UpdatePolicy") or {},
        creation_policy=content.get("CreationPolicy") or {},
        metadata=content.get("Metadata") or {},
    )
