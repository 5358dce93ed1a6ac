"""A template with its values: what of it is active, and in which order."""

from __future__ import annotations

from typing import Any

from trainlocal.cloud.formation.graph import in_order, needs
from trainlocal.cloud.formation.intrinsics import NO_VALUE, Evaluator, Surroundings, text_of
from trainlocal.cloud.formation.stack import Intent, Output, Stack
from trainlocal.cloud.formation.surroundings import ACCOUNT
from trainlocal.cloud.formation.template import Declaration, Template


def evaluator_of(stack: Stack, intent: Intent, surroundings: Surroundings) -> Evaluator:
    """An evaluator of a template's expressions for one stack."""
    partition = "aws-cn" if stack.region.startswith("cn-") else "aws-us-gov" if stack.region.startswith("us-gov-") else "aws"
    pseudo: dict[str, Any] = {
        "AWS::AccountId": ACCOUNT,
        "AWS::NoValue": NO_VALUE,
        "AWS::NotificationARNs": list(intent.notification_arns),
        "AWS::Partition": partition,
        "AWS::Region": stack.region,
        "AWS::StackId": stack.identifier,
        "AWS::StackName": stack.name,
        "AWS::URLSuffix": "amazonaws.com.cn" if partition == "aws-cn" else "amazonaws.com",
    }
    return Evaluator(
        surroundings=surroundings,
        pseudo=pseudo,
        parameters={key: parameter.value for key, parameter in intent.parameters.items()},
        mappings=intent.template.section("Mappings"),
        conditions=intent.template.section("Conditions"),
        resources=frozenset(intent.template.declarations),
    )


def active_declarations(template: Template, evaluator: Evaluator) -> list[Declaration]:
    """The declarations whose condition holds, each after what it needs."""
    active = {
        logical: declaration
        for logical, declaration in template.declarations.items()
        if declaration.condition is None or evaluator.condition(declaration.condition)
    }
    known = frozenset(active)
    return [active[name] for name in in_order({logical: needs(each, known) for logical, each in active.items()})]


def outputs_of(template: Template, evaluator: Evaluator) -> list[Output]:
    """The outputs whose condition holds. A value that is not known yet shows as the text of ``UNKNOWN``."""
    outputs = []
    for key, declared in template.section("Outputs").items():
        if "Condition" in declared and not evaluator.condition(declared["Condition"]):
            continue
        export = declared.get("Export")
        outputs.append(
            Output(
                key=key,
                value=text_of(evaluator.value(declared["Value"])),
                description=declared.get("Description"),
                export=text_of(evaluator.value(export["Name"])) if export else None,
            )
        )
    return outputs
