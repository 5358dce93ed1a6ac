"""From findings to the construct tree: all of an app are shown together at synth."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import jsii
from aws_cdk import Acknowledgment, Annotations, Token, Validations

from constructs import Construct, IValidation
from traincluster.rules.engine import find_rule
from traincluster.rules.finding import Finding

Value = TypeVar("Value")


def known(value: Value | None) -> Value | None:
    """A value as a rule may see it: None when it is a token that only the deployment resolves."""
    return None if value is None or Token.is_unresolved(value) else value


def report(scope: Construct, findings: Iterable[Finding]) -> None:
    """Attach findings to a construct.

    Errors stop the synth, which lists those of the whole app at once. Warnings and infos are shown by the CDK, and a
    warning stops `cdk --strict`, unless it is acknowledged.
    """
    findings = tuple(findings)
    errors = [str(finding) for finding in findings if finding.level == "error"]
    if errors:
        scope.node.add_validation(_Errors(errors))
    for finding in findings:
        text = f"{finding.message} {finding.fix}"
        if finding.level == "warning":
            Annotations.of(scope).add_warning_v2(annotation_id(finding.rule), text)
        elif finding.level == "info":
            Annotations.of(scope).add_info_v2(annotation_id(finding.rule), text)


def acknowledge(scope: Construct, rule: str, reason: str) -> None:
    """Silence the warnings of a rule for a construct and all in it. The reason is kept in the metadata of the construct.

    Raises:
        ValueError: no such rule, a rule that gives no warnings, or no reason.
    """
    found = find_rule(rule)
    if not found.can_be_acknowledged:
        raise ValueError(
            f"The rule {rule!r} finds {' and '.join(f'{level}s' for level in found.levels)}, and only a warning can be "
            "acknowledged. Do what its finding says."
        )
    if not reason.strip():
        raise ValueError(f"The rule {rule!r} is acknowledged without a reason. Say why its warning does not matter here.")
    Validations.of(scope).acknowledge(Acknowledgment(id=annotation_id(rule), reason=reason))


def annotation_id(rule: str) -> str:
    """The id of a rule's warnings among the CDK's annotations."""
    return f"traincluster:{rule}"


@jsii.implements(IValidation)
class _Errors:
    """Tells the CDK at synth what was found while the construct was made."""

    def __init__(self, errors: list[str]) -> None:
        self._errors = errors

    def validate(self) -> list[str]:
        return self._errors
