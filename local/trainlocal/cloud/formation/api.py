"""The query protocol of CloudFormation: requests to calls of ``StackAccount``, its records to answers.

moto parses the requests and writes the XML from botocore's own model of the service; this module only names the fields.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from moto.core.exceptions import ServiceException
from moto.core.request import Request
from moto.core.responses import ActionResult, BaseResponse, EmptyResult
from werkzeug.wrappers import Response

from trainlocal.cloud.formation.account import StackAccount
from trainlocal.cloud.formation.faults import FormationError, InternalFailure
from trainlocal.cloud.formation.parameters import Parameter
from trainlocal.cloud.formation.stack import ChangeSet, Event, Intent, Resource, Stack
from trainlocal.cloud.resources import provider_of

PAGE = 100


class FormationRequest(Request):
    """A request as moto's machinery takes it."""

    from_wsgi_server = True


class _Answer(ServiceException):
    """A ``FormationError`` in the form in which moto serializes errors."""

    def __init__(self, error: FormationError) -> None:
        super().__init__(error.code, error.message)


def serve_formation(account: StackAccount, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answers one request."""
    status, headers, body = FormationApi(account)._dispatch(FormationRequest(environ))
    plain = {name: str(value) for name, value in headers.items() if name != "status"}
    return Response(body, status, plain)(environ, start_response)


class FormationApi(BaseResponse):
    """One request's actions; each method is an action of the API in snake case."""

    def __init__(self, account: StackAccount) -> None:
        super().__init__(service_name="cloudformation")
        self.automated_parameter_parsing = True
        self._account = account

    def call_action(self) -> Any:
        """Calls the method of the action; an error of ours becomes an answer of CloudFormation's."""
        action = self._get_action()
        method = _ACTIONS.get(action)
        try:
            if method is None:
                raise FormationError(f"The action {action} of CloudFormation is not emulated")
            result = method(self, dict(self.params))
        except FormationError as error:
            result = ActionResult(_Answer(error))
        except Exception as error:
            traceback.print_exception(error)
            result = ActionResult(_Answer(InternalFailure(f"fault in the emulation: {error!r}")))
        return self.serialized(result)

    def create_change_set(self, params: dict[str, Any]) -> ActionResult:
        stack, change_set = self._account.create_change_set(self.region, params)
        return ActionResult({"Id": change_set.identifier, "StackId": stack.identifier})

    def describe_change_set(self, params: dict[str, Any]) -> ActionResult:
        stack, change_set = self._account.change_set(self.region, params)
        intent = change_set.intent
        return ActionResult(
            {
                **_change_set_summary(stack, change_set),
                "Parameters": _parameters(intent.parameters),
                "NotificationARNs": list(intent.notification_arns),
                "Capabilities": list(intent.capabilities),
                "Tags": _tags(intent.tags),
                "Changes": change_set.changes,
                "IncludeNestedStacks": False,
            }
        )

    def list_change_sets(self, params: dict[str, Any]) -> ActionResult:
        stack = self._account.stack(self.region, params["StackName"])
        return ActionResult({"Summaries": [_change_set_summary(stack, each) for each in stack.change_sets.values()]})

    def execute_change_set(self, params: dict[str, Any]) -> ActionResult:
        self._account.execute_change_set(self.region, params)
        return ActionResult({})

    def delete_change_set(self, params: dict[str, Any]) -> ActionResult:
        self._account.delete_change_set(self.region, params)
        return ActionResult({})

    def create_stack(self, params: dict[str, Any]) -> ActionResult:
        return ActionResult({"StackId": self._account.create_stack(self.region, params).identifier})

    def update_stack(self, params: dict[str, Any]) -> ActionResult:
        return ActionResult({"StackId": self._account.update_stack(self.region, params).identifier})

    def delete_stack(self, params: dict[str, Any]) -> ActionResult:
        self._account.delete_stack(self.region, params)
        return EmptyResult()

    def signal_resource(self, params: dict[str, Any]) -> ActionResult:
        self._account.signal_resource(self.region, params)
        return EmptyResult()

    def update_termination_protection(self, params: dict[str, Any]) -> ActionResult:
        stack = self._account.stack(self.region, params["StackName"])
        stack.protected = bool(params["EnableTerminationProtection"])
        return ActionResult({"StackId": stack.identifier})

    def describe_stacks(self, params: dict[str, Any]) -> ActionResult:
        if params.get("StackName"):
            return ActionResult({"Stacks": [_stack(self._account.stack(self.region, params["StackName"]))]})
        return ActionResult({"Stacks": [_stack(stack) for stack in self._account.stacks(self.region) if stack.exists]})

    def list_stacks(self, params: dict[str, Any]) -> ActionResult:
        wanted = params.get("StackStatusFilter", [])
        chosen = [stack for stack in self._account.stacks(self.region) if not wanted or stack.status in wanted]
        return ActionResult({"StackSummaries": [_stack_summary(stack) for stack in chosen]})

    def describe_stack_events(self, params: dict[str, Any]) -> ActionResult:
        stack = self._account.stack(self.region, params["StackName"])
        events = list(reversed(stack.events))
        start = int(params.get("NextToken") or 0)
        following = str(start + PAGE) if len(events) > start + PAGE else None
        page = [_event(stack, each) for each in events[start : start + PAGE]]
        return ActionResult({"StackEvents": page, "NextToken": following})

    def describe_stack_resources(self, params: dict[str, Any]) -> ActionResult:
        stack, chosen = self._resources(params)
        described = [{**_resource(each), "Timestamp": each.updated, **_stack_names(stack)} for each in chosen]
        return ActionResult({"StackResources": described})

    def describe_stack_resource(self, params: dict[str, Any]) -> ActionResult:
        stack, chosen = self._resources(params)
        if not chosen:
            raise FormationError(f"Resource {params['LogicalResourceId']} does not exist for stack {stack.name}")
        detail = {**_resource(chosen[0]), "LastUpdatedTimestamp": chosen[0].updated, **_stack_names(stack), "Metadata": "{}"}
        return ActionResult({"StackResourceDetail": detail})

    def list_stack_resources(self, params: dict[str, Any]) -> ActionResult:
        _, chosen = self._resources(params)
        summaries = [{**_resource(each), "LastUpdatedTimestamp": each.updated} for each in chosen]
        return ActionResult({"StackResourceSummaries": summaries})

    def _resources(self, params: dict[str, Any]) -> tuple[Stack, list[Resource]]:
        wanted = params.get("LogicalResourceId")
        if params.get("StackName"):
            stack = self._account.stack(self.region, params["StackName"])
            return stack, [each for each in stack.resources.values() if wanted in (None, each.logical)]
        for stack in self._account.stacks(self.region):
            if any(each.physical_id == params.get("PhysicalResourceId") for each in stack.resources.values()):
                return stack, list(stack.resources.values())
        raise FormationError(f"Stack for {params.get('PhysicalResourceId')} does not exist")

    def get_template(self, params: dict[str, Any]) -> ActionResult:
        if params.get("ChangeSetName"):
            intent: Intent | None = self._account.change_set(self.region, params)[1].intent
        else:
            intent = self._account.stack(self.region, params["StackName"]).intent
        body = intent.template.body if intent else "{}"  # a stack under review has none yet
        return ActionResult({"TemplateBody": body, "StagesAvailable": ["Original", "Processed"]})

    def get_template_summary(self, params: dict[str, Any]) -> ActionResult:
        template = self._account.template(self.region, params)
        types = sorted({declaration.type for declaration in template.declarations.values()})
        return ActionResult(
            {
                "Parameters": [
                    {
                        "ParameterKey": key,
                        "DefaultValue": _text(each.get("Default")),
                        "ParameterType": each.get("Type", "String"),
                        "NoEcho": bool(each.get("NoEcho", False)),
                        "Description": each.get("Description"),
                    }
                    for key, each in template.section("Parameters").items()
                ],
                "Description": template.description,
                "ResourceTypes": types,
                "Version": template.document.get("AWSTemplateFormatVersion"),
                "Metadata": json.dumps(template.section("Metadata")),
                "Capabilities": ["CAPABILITY_NAMED_IAM"] if any(_needs_capability(each) for each in types) else [],
            }
        )

    def validate_template(self, params: dict[str, Any]) -> ActionResult:
        template = self._account.template(self.region, params)
        parameters = [
            {
                "ParameterKey": key,
                "DefaultValue": _text(each.get("Default")),
                "NoEcho": bool(each.get("NoEcho", False)),
                "Description": each.get("Description"),
            }
            for key, each in template.section("Parameters").items()
        ]
        return ActionResult({"Parameters": parameters, "Description": template.description})

    def list_exports(self, params: dict[str, Any]) -> ActionResult:
        exports = [
            {"ExportingStackId": stack.identifier, "Name": output.export, "Value": output.value}
            for stack, output in self._account.exports(self.region).all()
        ]
        return ActionResult({"Exports": exports})

    def list_imports(self, params: dict[str, Any]) -> ActionResult:
        importers = self._account.exports(self.region).importers(params["ExportName"])
        if not importers:
            raise FormationError(f"Export '{params['ExportName']}' is not imported by any stack.")
        return ActionResult({"Imports": importers})


_ACTIONS: dict[str, Callable[[FormationApi, dict[str, Any]], ActionResult]] = {
    "CreateChangeSet": FormationApi.create_change_set,
    "CreateStack": FormationApi.create_stack,
    "DeleteChangeSet": FormationApi.delete_change_set,
    "DeleteStack": FormationApi.delete_stack,
    "DescribeChangeSet": FormationApi.describe_change_set,
    "DescribeStackEvents": FormationApi.describe_stack_events,
    "DescribeStackResource": FormationApi.describe_stack_resource,
    "DescribeStackResources": FormationApi.describe_stack_resources,
    "DescribeStacks": FormationApi.describe_stacks,
    "ExecuteChangeSet": FormationApi.execute_change_set,
    "GetTemplate": FormationApi.get_template,
    "GetTemplateSummary": FormationApi.get_template_summary,
    "ListChangeSets": FormationApi.list_change_sets,
    "ListExports": FormationApi.list_exports,
    "ListImports": FormationApi.list_imports,
    "ListStackResources": FormationApi.list_stack_resources,
    "ListStacks": FormationApi.list_stacks,
    "SignalResource": FormationApi.signal_resource,
    "UpdateStack": FormationApi.update_stack,
    "UpdateTerminationProtection": FormationApi.update_termination_protection,
    "ValidateTemplate": FormationApi.validate_template,
}


def _needs_capability(type: str) -> bool:
    provider = provider_of(type)
    return provider is not None and provider.makes_identities


def _text(value: Any) -> str | None:
    return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _tags(tags: Any) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def _parameters(parameters: Any) -> list[dict[str, Any]]:
    return [_parameter(key, each) for key, each in parameters.items()]


def _parameter(key: str, parameter: Parameter) -> dict[str, Any]:
    shown: dict[str, Any] = {"ParameterKey": key, "ParameterValue": "****" if parameter.hidden else parameter.given}
    if parameter.stored:
        value = parameter.value
        shown["ResolvedValue"] = ",".join(value) if isinstance(value, list) else value
    return shown


def _stack_names(stack: Stack) -> dict[str, Any]:
    return {"StackId": stack.identifier, "StackName": stack.name}


def _stack(stack: Stack) -> dict[str, Any]:
    intent = stack.intent
    outputs = [
        {"OutputKey": each.key, "OutputValue": each.value, "Description": each.description, "ExportName": each.export}
        for each in stack.outputs
    ]
    return {
        **_stack_names(stack),
        "Description": intent.template.description if intent else None,
        "Parameters": _parameters(stack.parameters),
        "CreationTime": stack.created,
        "LastUpdatedTime": stack.updated,
        "DeletionTime": stack.deleted,
        "StackStatus": stack.status,
        "StackStatusReason": stack.reason,
        "DisableRollback": intent.keep_failed if intent else False,
        "NotificationARNs": list(intent.notification_arns) if intent else [],
        "Capabilities": list(intent.capabilities) if intent else [],
        "Outputs": outputs,
        "RoleARN": intent.role_arn if intent else None,
        "Tags": _tags(intent.tags) if intent else [],
        "EnableTerminationProtection": stack.protected,
        "ChangeSetId": stack.change_set_id,
        "DriftInformation": {"StackDriftStatus": "NOT_CHECKED"},
    }


def _stack_summary(stack: Stack) -> dict[str, Any]:
    described = _stack(stack)
    described["TemplateDescription"] = described["Description"]
    return described


def _change_set_summary(stack: Stack, change_set: ChangeSet) -> dict[str, Any]:
    return {
        **_stack_names(stack),
        "ChangeSetName": change_set.name,
        "ChangeSetId": change_set.identifier,
        "Description": change_set.description,
        "CreationTime": change_set.created,
        "ExecutionStatus": change_set.execution_status,
        "Status": change_set.status,
        "StatusReason": change_set.reason,
    }


def _resource(resource: Resource) -> dict[str, Any]:
    return {
        "LogicalResourceId": resource.logical,
        "PhysicalResourceId": resource.physical_id or None,
        "ResourceType": resource.type,
        "ResourceStatus": resource.status,
        "ResourceStatusReason": resource.reason,
        "DriftInformation": {"StackResourceDriftStatus": "NOT_CHECKED"},
    }


def _event(stack: Stack, event: Event) -> dict[str, Any]:
    return {
        **_stack_names(stack),
        "EventId": event.identifier,
        "LogicalResourceId": event.logical,
        "PhysicalResourceId": event.physical_id,
        "ResourceType": event.type,
        "Timestamp": event.time,
        "ResourceStatus": event.status,
        "ResourceStatusReason": event.reason,
        "ResourceProperties": event.properties,
        "ClientRequestToken": event.token,
    }
