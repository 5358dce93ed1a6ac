"""What is looked at in a whole template before anything of it is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from trainlocal.cloud.formation.faults import FormationError, InsufficientCapabilities
from trainlocal.cloud.formation.graph import in_order, needs
from trainlocal.cloud.formation.intrinsics import Evaluator, references
from trainlocal.cloud.formation.surroundings import provider_for
from trainlocal.cloud.formation.template import Declaration, Template
from trainlocal.cloud.resources import NOTHING, emulated_types, provider_of


def check_template(template: Template) -> None:
    """Raises ``FormationError`` with every fault of a template: unemulated types, properties and attributes, loose ends."""
    _check_references(template)
    faults = [fault for declaration in template.declarations.values() for fault in _faults(declaration, template)]
    if faults:
        raise FormationError("The template cannot be deployed here: " + "; ".join(faults))
    known = frozenset(template.declarations)
    in_order({logical: needs(declaration, known) for logical, declaration in template.declarations.items()})


def check_capabilities(template: Template, capabilities: tuple[str, ...]) -> None:
    """Raises when the template makes IAM resources and the request does not acknowledge it."""
    needed = set()
    for declaration in template.declarations.values():
        provider = provider_for(declaration.type)
        if provider.makes_identities:
            named = provider.name_property in declaration.properties
            needed.add("CAPABILITY_NAMED_IAM" if named else "CAPABILITY_IAM")
    if "CAPABILITY_NAMED_IAM" in capabilities:
        needed.clear()
    if missing := sorted(needed - set(capabilities)):
        raise InsufficientCapabilities(f"Requires capabilities : [{', '.join(missing)}]")


def check_rules(template: Template, evaluator: Evaluator) -> None:
    """Raises with the descriptions of all assertions of the section Rules that do not hold."""
    broken = []
    for rule in template.section("Rules").values():
        if "RuleCondition" in rule and not evaluator.truth(rule["RuleCondition"]):
            continue
        broken += [
            assertion.get("AssertDescription", f"the assertion {assertion['Assert']!r} does not hold")
            for assertion in rule["Assertions"]
            if not evaluator.truth(assertion["Assert"])
        ]
    if broken:
        raise FormationError(f"Template error: {'; '.join(broken)}")


def _check_references(template: Template) -> None:
    known = {*template.declarations, *template.section("Parameters")}
    for declaration in template.declarations.values():
        named = {name for name, _ in references(declaration.properties)} | set(declaration.depends_on)
        unresolved = sorted(str(name) for name in named if name not in known and not str(name).startswith("AWS::"))
        if unresolved:
            raise FormationError(
                f"Template format error: Unresolved resource dependencies [{', '.join(unresolved)}] in the Resources block "
                f"of the template (resource {declaration.logical})"
            )


def _faults(declaration: Declaration, template: Template) -> Iterator[str]:
    provider = provider_of(declaration.type)
    if provider is None:
        near = get_close_matches(declaration.type, emulated_types(), n=1, cutoff=0.8)
        yield f"resource type {declaration.type} ({declaration.logical}) is not emulated" + "".join(
            f" ({each} is)" for each in near
        )
        return
    for fault in provider.schema.faults(declaration.properties, declaration.logical):
        yield f"{fault} ({declaration.type})"
    yield from _policy_faults("UpdatePolicy", declaration.update_policy, provider.update_policies, declaration)
    yield from _policy_faults("CreationPolicy", declaration.creation_policy, provider.creation_policies, declaration)
    for name, attribute in references(declaration.properties):
        target = template.declarations.get(name)
        if target is None or attribute is None:
            continue
        wanted = provider_of(target.type)
        if wanted is not None and isinstance(attribute, str) and attribute not in wanted.attributes:
            yield f"attribute {name}.{attribute} ({target.type}) is not emulated"


def _policy_faults(
    name: str, given: Mapping[str, Any], emulated: Mapping[str, frozenset[str]], declaration: Declaration
) -> Iterator[str]:
    for policy, settings in given.items():
        for setting in sorted(set(settings) - emulated.get(policy, NOTHING)):
            yield f"{name} {policy}.{setting} of {declaration.logical} ({declaration.type}) is not emulated"
