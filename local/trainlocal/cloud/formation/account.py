"""The stacks of the account: what can be asked of them and told to them."""

from __future__ import annotations

import re
from collections.abc import Callable
from threading import RLock, Thread
from typing import Any
from uuid import uuid4

from trainlocal.cloud.clients import Clients
from trainlocal.cloud.formation import faults
from trainlocal.cloud.formation.changes import Outlook, plan_changes
from trainlocal.cloud.formation.deployment import Deployment, reason_of
from trainlocal.cloud.formation.exports import Exports
from trainlocal.cloud.formation.faults import FormationError
from trainlocal.cloud.formation.parameters import resolve_parameters
from trainlocal.cloud.formation.plan import active_declarations, evaluator_of, outputs_of
from trainlocal.cloud.formation.removal import Removal
from trainlocal.cloud.formation.source import requested_template
from trainlocal.cloud.formation.stack import ChangeSet, Intent, Stack, now
from trainlocal.cloud.formation.surroundings import ACCOUNT, LiveSurroundings, read_parameter
from trainlocal.cloud.formation.template import Template
from trainlocal.cloud.formation.validation import check_capabilities, check_rules, check_template
from trainlocal.cloud.resources.cloudformation import WaitConditionHandle
from trainlocal.cloud.signals import Signal

PATIENCE_S = 5.0
"""How long a request that starts a deployment waits for its end before it answers.

CloudFormation answers at once, and clients then poll every few seconds. Most deployments here take less than a second, and
answering when they are done saves the client its first wait; a longer one goes on in the background as on AWS.
"""

NO_CHANGES = "The submitted information didn't contain changes. Submit different information to create a change set."
_UNIQUE_ID_LENGTH = 64
_STACK_NAME = re.compile(r"[a-zA-Z][-a-zA-Z0-9]{0,127}")
_UPDATABLE = ("CREATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE", "UPDATE_FAILED", "CREATE_FAILED")


class StackAccount:
    """Every stack of the account, in all regions."""

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self._stacks: dict[str, Stack] = {}
        self._lock = RLock()

    def stacks(self, region: str) -> list[Stack]:
        """The stacks of a region, deleted ones included, the newest first."""
        with self._lock:
            return [stack for stack in reversed(self._stacks.values()) if stack.region == region]

    def stack(self, region: str, name: str | None) -> Stack:
        """A stack by name or id; a deleted one only by its id. Raises ``FormationError`` when there is none."""
        for stack in self.stacks(region):
            if name == stack.identifier or (name == stack.name and stack.exists):
                return stack
        raise FormationError(f"Stack with id {name} does not exist")

    def exports(self, region: str) -> Exports:
        """What the stacks of a region export."""
        return Exports(self.stacks(region))

    def create_change_set(self, region: str, params: dict[str, Any]) -> tuple[Stack, ChangeSet]:
        """Looks at what a template would change, and keeps it ready for execution."""
        kind = params.get("ChangeSetType", "UPDATE")
        if kind not in ("CREATE", "UPDATE"):
            raise FormationError(f"The change set type {kind} is not emulated (CREATE and UPDATE are)")
        with self._lock:
            if kind == "CREATE":
                stack = self._stack_to_create(region, params["StackName"])
            else:
                stack = self._stack_to_update(region, params)
            if params["ChangeSetName"] in stack.change_sets:
                raise faults.AlreadyExists(f"ChangeSet {params['ChangeSetName']} already exists")
            intent = self._intent(stack, params)
            changes, changed = self._preview(stack, intent)
            change_set = ChangeSet(
                name=params["ChangeSetName"],
                identifier=f"arn:aws:cloudformation:{region}:{ACCOUNT}:changeSet/{params['ChangeSetName']}/{uuid4()}",
                kind=kind,
                intent=intent,
                changes=changes,
                description=params.get("Description"),
            )
            if not changed:
                change_set.status, change_set.execution_status, change_set.reason = "FAILED", "UNAVAILABLE", NO_CHANGES
            if stack.identifier not in self._stacks:
                self._stacks[stack.identifier] = stack
                stack.turn("REVIEW_IN_PROGRESS", reason="User Initiated", token=intent.token)
            stack.change_sets[change_set.name] = change_set
            return stack, change_set

    def change_set(self, region: str, params: dict[str, Any]) -> tuple[Stack, ChangeSet]:
        """A change set by name and stack, or by its id."""
        name = params["ChangeSetName"]
        stacks = [self.stack(region, params["StackName"])] if params.get("StackName") else self.stacks(region)
        for stack in stacks:
            for change_set in stack.change_sets.values():
                if name in (change_set.name, change_set.identifier):
                    return stack, change_set
        raise faults.ChangeSetNotFound(f"ChangeSet [{name}] does not exist")

    def delete_change_set(self, region: str, params: dict[str, Any]) -> None:
        """Forgets a change set; one that does not exist is no error, as on AWS, unless its stack does not exist either."""
        try:
            stack, change_set = self.change_set(region, params)
        except faults.ChangeSetNotFound:
            return
        del stack.change_sets[change_set.name]

    def execute_change_set(self, region: str, params: dict[str, Any]) -> None:
        """Does what a change set proposes."""
        with self._lock:
            stack, change_set = self.change_set(region, params)
            if change_set.execution_status != "AVAILABLE":
                raise faults.InvalidChangeSetStatus(
                    f"ChangeSet [{change_set.identifier}] cannot be executed in its current status of [{change_set.status}]"
                )
            _check_idle(stack)
            intent = change_set.intent
            intent.token, intent.keep_failed = params.get("ClientRequestToken"), bool(params.get("DisableRollback", False))
            change_set.execution_status = "EXECUTE_COMPLETE"
            stack.change_set_id = change_set.identifier
            work = self._begin(stack, intent)
        _run(stack, work)

    def create_stack(self, region: str, params: dict[str, Any]) -> Stack:
        """Makes a stack without a change set."""
        with self._lock:
            stack = self._stack_to_create(region, params["StackName"])
            intent = self._intent(stack, params)
            intent.keep_failed = bool(params.get("DisableRollback")) or params.get("OnFailure") == "DO_NOTHING"
            self._preview(stack, intent)
            stack.protected = bool(params.get("EnableTerminationProtection", False))
            self._stacks[stack.identifier] = stack
            work = self._begin(stack, intent)
        _run(stack, work)
        return stack

    def update_stack(self, region: str, params: dict[str, Any]) -> Stack:
        """Changes a stack without a change set."""
        with self._lock:
            stack = self._stack_to_update(region, params)
            intent = self._intent(stack, params)
            intent.keep_failed = bool(params.get("DisableRollback", False))
            _, changed = self._preview(stack, intent)
            if not changed:
                raise FormationError("No updates are to be performed.")
            work = self._begin(stack, intent)
        _run(stack, work)
        return stack

    def delete_stack(self, region: str, params: dict[str, Any]) -> None:
        """Removes a stack with its resources; a stack that does not exist is no error, as on AWS."""
        with self._lock:
            try:
                stack = self.stack(region, params["StackName"])
            except FormationError:
                return
            if not stack.exists:
                return
            if stack.protected:
                raise FormationError(f"Stack [{stack.name}] cannot be deleted while TerminationProtection is enabled")
            _check_idle(stack)
            token = params.get("ClientRequestToken")
            retained = frozenset(params.get("RetainResources", []))
            stack.turn("DELETE_IN_PROGRESS", reason="User Initiated", token=token)
        _run(stack, lambda: self._delete(stack, retained, token))

    def signal_resource(self, region: str, params: dict[str, Any]) -> None:
        """Takes an instance's word about the resource that it belongs to, while that is being made or changed."""
        stack, logical = self.stack(region, params["StackName"]), params["LogicalResourceId"]
        unique_id, status = params["UniqueId"], params["Status"]
        if not 1 <= len(unique_id) <= _UNIQUE_ID_LENGTH or status not in ("SUCCESS", "FAILURE"):
            raise FormationError(
                f"1 validation error detected: Value '{unique_id}' at 'uniqueId' or '{status}' at 'status' failed to satisfy "
                f"constraint: Member must have length less than or equal to {_UNIQUE_ID_LENGTH}, and be SUCCESS or FAILURE"
            )
        resource = stack.resources.get(logical)
        if resource is None:
            raise FormationError(f"Resource {logical} does not exist for stack {stack.name}")
        if not resource.status.endswith("_IN_PROGRESS"):
            raise FormationError(f"Resource {logical} is in {resource.status} state and can not be signaled")
        stack.note_signal(resource, f"Received {status} signal with UniqueId {unique_id}")
        stack.signals.send(logical, Signal(unique_id=unique_id, succeeded=status == "SUCCESS"))

    def signal_handle(self, address: str, signal: Signal) -> bool:
        """Takes what was sent to a handle, given by the path and query of its URL; False when no stack has such a handle."""
        with self._lock:
            stacks = list(self._stacks.values())
        for stack in stacks:
            for resource in list(stack.resources.values()):
                if resource.type == WaitConditionHandle.type and resource.physical_id.endswith(address):
                    stack.signals.send(resource.physical_id, signal)
                    return True
        return False

    def _delete(self, stack: Stack, retained: frozenset[str], token: str | None) -> None:
        exports = self.exports(stack.region)
        try:
            exports.check_change(stack, [])
        except FormationError as error:
            stack.turn("DELETE_FAILED", reason=f"Delete canceled. {error.message}", token=token)
            return
        if stack.intent is not None:
            removal = Removal(stack, LiveSurroundings(self.clients, stack, exports), stack.intent)
            failed = removal.remove(
                list(stack.resources.values()),
                policy=lambda resource: "Retain" if resource.logical in retained else resource.deletion_policy,
            )
            if failed:
                names = ", ".join(resource.logical for resource in failed)
                stack.turn("DELETE_FAILED", reason=f"The following resource(s) failed to delete: [{names}].", token=token)
                return
        stack.outputs, stack.imports, stack.deleted = [], set(), now()
        stack.turn("DELETE_COMPLETE", token=token)

    def _begin(self, stack: Stack, intent: Intent) -> Callable[[], None]:
        """Marks a stack as being deployed and returns the work."""
        deployment = Deployment(self.clients, stack, intent, self.exports(stack.region))
        if stack.status == "REVIEW_IN_PROGRESS":
            stack.turn("CREATE_IN_PROGRESS", reason="User Initiated", token=intent.token)
            return deployment.create
        stack.turn("UPDATE_IN_PROGRESS", reason="User Initiated", token=intent.token)
        return deployment.update

    def _stack_to_create(self, region: str, name: str) -> Stack:
        if not _STACK_NAME.fullmatch(name):
            raise FormationError(f"Stack name {name!r} must match [a-zA-Z][-a-zA-Z0-9]* and have at most 128 characters")
        for stack in self.stacks(region):
            if stack.name == name and stack.exists:
                if stack.status == "REVIEW_IN_PROGRESS":
                    return stack
                raise faults.AlreadyExists(f"Stack [{name}] already exists and cannot be created again with the changeSet")
        return Stack(name=name, identifier=f"arn:aws:cloudformation:{region}:{ACCOUNT}:stack/{name}/{uuid4()}", region=region)

    def _stack_to_update(self, region: str, params: dict[str, Any]) -> Stack:
        stack = self.stack(region, params["StackName"])
        if stack.status not in _UPDATABLE:
            raise FormationError(f"Stack:{stack.identifier} is in {stack.status} state and can not be updated.")
        return stack

    def _intent(self, stack: Stack, params: dict[str, Any]) -> Intent:
        previous = stack.intent
        template = requested_template(self.clients, stack.region, params, previous.template if previous else None)
        check_template(template)
        capabilities = tuple(params.get("Capabilities", []))
        check_capabilities(template, capabilities)
        inherited = previous.tags if previous else {}
        return Intent(
            template=template,
            parameters=resolve_parameters(
                template.section("Parameters"),
                params.get("Parameters", []),
                stack.parameters,
                lambda name: read_parameter(self.clients, stack.region, name),
            ),
            tags={tag["Key"]: tag["Value"] for tag in params["Tags"]} if "Tags" in params else inherited,
            capabilities=capabilities,
            notification_arns=tuple(params.get("NotificationARNs", [])),
            role_arn=params.get("RoleARN"),
            token=params.get("ClientRequestToken") or params.get("ClientToken"),
        )

    def _preview(self, stack: Stack, intent: Intent) -> tuple[list[dict[str, Any]], bool]:
        """The changes that an intent would bring, and whether there are any at all, outputs and tags included."""
        surroundings = LiveSurroundings(self.clients, stack, self.exports(stack.region))
        outlook = Outlook(surroundings, stack.resources)
        evaluator = evaluator_of(stack, intent, outlook)
        check_rules(intent.template, evaluator)
        changes = plan_changes(active_declarations(intent.template, evaluator), stack.resources, evaluator, outlook)
        if stack.intent is None:
            return changes, True
        changed = bool(changes) or intent.tags != stack.intent.tags or outputs_of(intent.template, evaluator) != stack.outputs
        return changes, changed

    def template(self, region: str, params: dict[str, Any]) -> Template:
        """The template that a request names, checked for form only."""
        previous = self.stack(region, params["StackName"]).intent if params.get("StackName") else None
        return requested_template(self.clients, region, params, previous.template if previous else None)


def _check_idle(stack: Stack) -> None:
    if stack.busy:
        raise FormationError(f"Stack:{stack.identifier} is in {stack.status} state and can not be updated.")


def _run(stack: Stack, work: Callable[[], None]) -> None:
    """Does the work in the background, waiting for it a while."""

    def guarded() -> None:
        try:
            work()
        except Exception as error:
            stack.turn(stack.status.replace("_IN_PROGRESS", "_FAILED"), reason=reason_of(error))

    thread = Thread(target=guarded, daemon=True, name=f"stack {stack.name}")
    thread.start()
    thread.join(PATIENCE_S)
