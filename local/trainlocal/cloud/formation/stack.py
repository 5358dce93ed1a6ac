"""What the account remembers of a stack: its resources, its events, its change sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

from trainlocal.cloud.formation.parameters import Parameter
from trainlocal.cloud.formation.template import Template
from trainlocal.cloud.signals import Signals


def now() -> datetime:
    """The present time in UTC, in milliseconds as CloudFormation tells it."""
    time = datetime.now(timezone.utc)
    return time.replace(microsecond=time.microsecond // 1000 * 1000)


@dataclass(kw_only=True)
class Resource:
    """A resource that exists, or is on its way in or out."""

    logical: str
    type: str
    physical_id: str
    properties: dict[str, Any]
    needs: frozenset[str] = frozenset()
    deletion_policy: str = "Delete"
    update_replace_policy: str = "Delete"
    status: str = "CREATE_COMPLETE"
    reason: str | None = None
    updated: datetime = field(default_factory=now)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a stack or to one of its resources."""

    logical: str
    physical_id: str | None
    type: str
    status: str
    reason: str | None
    token: str | None
    properties: str | None = None
    identifier: str = field(default_factory=lambda: str(uuid4()))
    time: datetime = field(default_factory=now)


@dataclass(frozen=True, kw_only=True)
class Output:
    """An output of a stack, and the name under which others may import it."""

    key: str
    value: str
    description: str | None = None
    export: str | None = None


@dataclass(kw_only=True)
class Intent:
    """What a stack is to become."""

    template: Template
    parameters: Mapping[str, Parameter]
    tags: Mapping[str, str]
    capabilities: tuple[str, ...] = ()
    notification_arns: tuple[str, ...] = ()
    role_arn: str | None = None
    token: str | None = None
    keep_failed: bool = False


@dataclass(kw_only=True)
class ChangeSet:
    """A proposed change of a stack."""

    name: str
    identifier: str
    kind: str
    intent: Intent
    changes: list[dict[str, Any]]
    status: str = "CREATE_COMPLETE"
    execution_status: str = "AVAILABLE"
    reason: str | None = None
    description: str | None = None
    created: datetime = field(default_factory=now)


@dataclass(kw_only=True)
class Stack:
    """A stack: what it is now, what it was told, and what happened."""

    name: str
    identifier: str
    region: str
    status: str = "REVIEW_IN_PROGRESS"
    reason: str | None = None
    intent: Intent | None = None
    resources: dict[str, Resource] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)
    change_sets: dict[str, ChangeSet] = field(default_factory=dict)
    signals: Signals = field(default_factory=Signals)
    protected: bool = False
    created: datetime = field(default_factory=now)
    updated: datetime | None = None
    deleted: datetime | None = None
    change_set_id: str | None = None

    @property
    def busy(self) -> bool:
        """True while something is being done to the stack."""
        return self.status.endswith("_IN_PROGRESS") and self.status != "REVIEW_IN_PROGRESS"

    @property
    def exists(self) -> bool:
        """False once the stack is deleted."""
        return self.status != "DELETE_COMPLETE"

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """The values of the parameters as the stack is; empty before the first deployment."""
        return self.intent.parameters if self.intent else {}

    def record(
        self,
        resource: Resource,
        status: str,
        *,
        reason: str | None = None,
        token: str | None = None,
        properties: str | None = None,
    ) -> None:
        """Gives a resource a status and writes it down as an event."""
        resource.status, resource.reason, resource.updated = status, reason, now()
        self._note(
            Event(
                logical=resource.logical,
                physical_id=resource.physical_id or None,
                type=resource.type,
                status=status,
                reason=reason,
                token=token,
                properties=properties,
            )
        )

    def note_signal(self, resource: Resource, text: str) -> None:
        """Writes a signal down as an event of the resource that it was sent to, whose status stays."""
        self._note(
            Event(
                logical=resource.logical,
                physical_id=resource.physical_id or None,
                type=resource.type,
                status=resource.status,
                reason=text,
                token=None,
            )
        )

    def turn(self, status: str, *, reason: str | None = None, token: str | None = None) -> None:
        """Gives the stack itself a status and writes it down as an event."""
        self.status, self.reason = status, reason
        self._note(
            Event(
                logical=self.name,
                physical_id=self.identifier,
                type="AWS::CloudFormation::Stack",
                status=status,
                reason=reason,
                token=token,
            )
        )

    def _note(self, event: Event) -> None:
        """Adds an event, a millisecond at least after the last, so that clients that sort by time keep the order."""
        if self.events and event.time <= self.events[-1].time:
            event = replace(event, time=self.events[-1].time + timedelta(milliseconds=1))
        self.events.append(event)
