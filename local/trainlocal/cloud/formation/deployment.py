"""Carries a stack from what it is to what it is to become, and back when that fails."""

from __future__ import annotations

import json
import traceback
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from trainlocal.cloud.clients import Clients
from trainlocal.cloud.formation.changes import changed_names
from trainlocal.cloud.formation.exports import Exports
from trainlocal.cloud.formation.faults import FormationError
from trainlocal.cloud.formation.graph import needs
from trainlocal.cloud.formation.intrinsics import Evaluator, text_of
from trainlocal.cloud.formation.journal import Added, Changed, Replaced, Step
from trainlocal.cloud.formation.plan import active_declarations, evaluator_of, outputs_of
from trainlocal.cloud.formation.removal import Removal
from trainlocal.cloud.formation.stack import Intent, Resource, Stack, now
from trainlocal.cloud.formation.surroundings import LiveSurroundings, provider_for
from trainlocal.cloud.formation.template import Declaration


class ResourceFailed(Exception):
    """A resource could not be made or changed; its events say why."""


def reason_of(error: Exception) -> str:
    """Why something failed, as a stack event says it. A fault of the emulation itself is shown where it runs, too."""
    if isinstance(error, ClientError):
        details = error.response["Error"]
        return f"{details.get('Message') or details['Code']} (Operation: {error.operation_name}, Error Code: {details['Code']})"
    if isinstance(error, (FormationError, BotoCoreError, ValueError)):
        return str(error)
    traceback.print_exception(error)
    return f"fault in the emulation: {error!r}"


class Deployment:
    """One creation or update of a stack."""

    def __init__(self, clients: Clients, stack: Stack, intent: Intent, exports: Exports) -> None:
        self._stack = stack
        self._intent = intent
        self._exports = exports
        self._surroundings = LiveSurroundings(clients, stack, exports)
        self._evaluator: Evaluator = evaluator_of(stack, intent, self._surroundings)
        self._removal = Removal(stack, self._surroundings, intent)
        self._journal: list[Step] = []
        self._kept: list[tuple[Resource, Resource]] = []  # and what their declarations now say of them
        self._before = (stack.intent, list(stack.outputs), set(stack.imports))

    def create(self) -> None:
        """Makes everything; on failure removes what was made. The stack is CREATE_IN_PROGRESS already."""
        self._stack.intent = self._intent
        try:
            self._apply()
            self._set_outputs()
        except ResourceFailed as failure:
            self._roll_back_creation(str(failure))
        else:
            self._stack.turn("CREATE_COMPLETE", token=self._intent.token)

    def update(self) -> None:
        """Changes what differs; on failure changes it back. The stack is UPDATE_IN_PROGRESS already."""
        self._stack.intent, self._stack.updated = self._intent, now()
        try:
            self._apply()
            dropped = self._drop_undeclared()
            self._set_outputs()
        except ResourceFailed as failure:
            self._roll_back_update(str(failure))
            return
        for kept, fresh in self._kept:
            kept.needs, kept.deletion_policy = fresh.needs, fresh.deletion_policy
            kept.update_replace_policy = fresh.update_replace_policy
        self._stack.turn("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS", token=self._intent.token)
        superseded = [step.old for step in self._journal if isinstance(step, Replaced)]
        self._removal.remove([*superseded, *dropped], policy=lambda resource: self._cleanup_policy(resource, superseded))
        self._stack.turn("UPDATE_COMPLETE", token=self._intent.token)

    def _cleanup_policy(self, resource: Resource, superseded: list[Resource]) -> str:
        replaced = any(resource is old for old in superseded)
        return resource.update_replace_policy if replaced else resource.deletion_policy

    def _apply(self) -> None:
        for declaration in active_declarations(self._intent.template, self._evaluator):
            existing = self._stack.resources.get(declaration.logical)
            if existing is None:
                self._journal.append(Added(self._make(declaration)))
            else:
                self._bring_up_to_date(declaration, existing)

    def _make(self, declaration: Declaration, *, replaced: Resource | None = None) -> Resource:
        """Makes one resource; when it replaces another, the other stays until the cleanup."""
        verb = "UPDATE" if replaced else "CREATE"
        resource = self._resource(declaration)
        self._stack.resources[declaration.logical] = resource
        if replaced:
            resource.physical_id = replaced.physical_id  # until it has its own, as CloudFormation shows it
        self._stack.record(resource, f"{verb}_IN_PROGRESS", reason=_REPLACING if replaced else None, token=self._intent.token)
        resource.physical_id = ""
        self._stack.signals.expect(declaration.logical)
        try:
            resource.properties = self._evaluator.value(declaration.properties)
            provider = provider_for(declaration.type)
            _check_name(replaced, resource, provider.name_property)
            converted = provider.schema.convert(resource.properties, declaration.logical)
            place = self._surroundings.place(declaration.logical, self._intent)
            resource.physical_id = provider.create(place, converted)
            described = json.dumps(resource.properties)
            initiated = f"Resource {'creation' if not replaced else 'update'} Initiated"
            self._record(resource, f"{verb}_IN_PROGRESS", initiated, described)
            provider.settle(place, converted)
        except Exception as error:
            self._record(resource, f"{verb}_FAILED", reason_of(error))
            if replaced:
                self._stack.resources[declaration.logical] = replaced
            else:
                self._journal.append(Added(resource))
            raise ResourceFailed(f"The following resource(s) failed to {verb.lower()}: [{declaration.logical}].") from error
        self._record(resource, f"{verb}_COMPLETE")
        return resource

    def _bring_up_to_date(self, declaration: Declaration, existing: Resource) -> None:
        try:
            properties = self._evaluator.value(declaration.properties)
        except Exception as error:
            self._record(existing, "UPDATE_FAILED", reason_of(error))
            raise ResourceFailed(f"The following resource(s) failed to update: [{declaration.logical}].") from error
        provider = provider_for(declaration.type)
        names = changed_names(existing, declaration, properties)
        fresh = self._resource(declaration)
        self._kept.append((existing, fresh))
        if "Type" in names or (names and provider.needs_replacement(existing.properties, properties)):
            self._journal.append(Replaced(new=self._make(declaration, replaced=existing), old=existing))
        elif names or self._tags_changed(declaration.type):
            self._change(existing, properties)

    def _tags_changed(self, type: str) -> bool:
        before = self._before[0]
        return "Tags" in provider_for(type).schema.fields and before is not None and before.tags != self._intent.tags

    def _change(self, resource: Resource, properties: dict[str, Any]) -> None:
        step = Changed(resource, dict(resource.properties))
        self._journal.append(step)
        self._record(resource, "UPDATE_IN_PROGRESS")
        try:
            self._write(resource, properties, self._intent)
        except Exception as error:
            self._record(resource, "UPDATE_FAILED", reason_of(error))
            raise ResourceFailed(f"The following resource(s) failed to update: [{resource.logical}].") from error
        self._record(resource, "UPDATE_COMPLETE")

    def _write(self, resource: Resource, properties: dict[str, Any], intent: Intent) -> None:
        """Changes a resource in place to the given properties, and remembers them even if it fails half-way."""
        provider = provider_for(resource.type)
        before = provider.schema.convert(resource.properties, resource.logical)
        resource.properties = properties
        after = provider.schema.convert(properties, resource.logical)
        provider.update(self._surroundings.place(resource.logical, intent), resource.physical_id, after, before)

    def _drop_undeclared(self) -> list[Resource]:
        """Takes the resources that the template no longer declares off the stack; they are removed at the cleanup."""
        declared = {each.logical for each in active_declarations(self._intent.template, self._evaluator)}
        return [resource for logical, resource in self._stack.resources.items() if logical not in declared]

    def _set_outputs(self) -> None:
        try:
            outputs = outputs_of(self._intent.template, self._evaluator)
            self._exports.check_change(self._stack, outputs)
        except Exception as error:
            raise ResourceFailed(reason_of(error)) from error
        self._stack.outputs = outputs
        self._stack.imports = set(self._surroundings.used_imports)

    def _roll_back_creation(self, reason: str) -> None:
        if self._intent.keep_failed:
            self._stack.turn("CREATE_FAILED", reason=reason, token=self._intent.token)
            return
        self._stack.turn("ROLLBACK_IN_PROGRESS", reason=f"{reason} Rollback requested by user.", token=self._intent.token)
        made = list(self._stack.resources.values())
        left = self._removal.remove(made, policy=lambda resource: resource.deletion_policy, creating=True)
        self._stack.outputs = []
        self._stack.turn("ROLLBACK_FAILED" if left else "ROLLBACK_COMPLETE", token=self._intent.token)

    def _roll_back_update(self, reason: str) -> None:
        if self._intent.keep_failed:
            self._stack.turn("UPDATE_FAILED", reason=reason, token=self._intent.token)
            return
        self._stack.turn("UPDATE_ROLLBACK_IN_PROGRESS", reason=reason, token=self._intent.token)
        before, self._stack.outputs, self._stack.imports = self._before
        assert before is not None
        unwanted: list[Resource] = []
        for step in reversed(self._journal):
            if isinstance(step, Added):
                unwanted.append(step.resource)
            elif isinstance(step, Replaced):
                self._stack.resources[step.old.logical] = step.old
                self._record(step.old, "UPDATE_COMPLETE")
                unwanted.append(step.new)
            elif not self._change_back(step, before):
                self._stack.turn("UPDATE_ROLLBACK_FAILED", reason=step.resource.reason, token=self._intent.token)
                return
        self._stack.intent = before
        self._stack.turn("UPDATE_ROLLBACK_COMPLETE_CLEANUP_IN_PROGRESS", token=self._intent.token)
        self._removal.remove(unwanted, policy=lambda _: "Delete", creating=True)
        self._stack.turn("UPDATE_ROLLBACK_COMPLETE", token=self._intent.token)

    def _change_back(self, step: Changed, before: Intent) -> bool:
        self._record(step.resource, "UPDATE_IN_PROGRESS")
        try:
            self._write(step.resource, step.properties, before)
        except Exception as error:
            self._record(step.resource, "UPDATE_FAILED", reason_of(error))
            return False
        self._record(step.resource, "UPDATE_COMPLETE")
        return True

    def _resource(self, declaration: Declaration) -> Resource:
        known = frozenset(self._intent.template.declarations)
        return Resource(
            logical=declaration.logical,
            type=declaration.type,
            physical_id="",
            properties={},
            needs=needs(declaration, known),
            deletion_policy=text_of(self._evaluator.value(declaration.deletion_policy)),
            update_replace_policy=text_of(self._evaluator.value(declaration.update_replace_policy)),
        )

    def _record(self, resource: Resource, status: str, reason: str | None = None, properties: str | None = None) -> None:
        self._stack.record(resource, status, reason=reason, token=self._intent.token, properties=properties)


_REPLACING = "Requested update requires the creation of a new physical resource; hence creating one."


def _check_name(replaced: Resource | None, resource: Resource, name_property: str | None) -> None:
    """A resource with a name of the user's cannot stand beside its replacement of the same name."""
    if replaced is None or name_property is None:
        return
    name = resource.properties.get(name_property)
    if name is not None and name == replaced.properties.get(name_property):
        raise FormationError(
            f"CloudFormation cannot update a stack when a custom-named resource requires replacing. Rename {name} and update "
            "the stack again."
        )
