"""Whether CloudFormation waits until nodes have passed their checks."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

import jsii
from aws_cdk import (
    CfnCreationPolicy,
    CfnResourceSignal,
    CfnWaitCondition,
    CfnWaitConditionHandle,
    IStableStringProducer,
    Lazy,
    Stack,
)
from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_iam as iam

from constructs import Construct
from trainrun.spec import ReadinessSpec, ReadinessWay, RunSpec

DEFAULT_MINUTES = 30
MOST_MINUTES = {"none": 0, "signal": 60, "wait_condition": 720}
"""A rolling update waits an hour at most (UpdatePolicy, PauseTime), a wait condition 12."""


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """How a deploy waits for its nodes.

    By default it does not: CloudFormation would take a lack of capacity, which may last for hours, for a failure of the stack,
    and roll all of it back. Whoever has reserved capacity, or CPU nodes, may have it wait.

    Example:
        >>> Readiness.wait_condition(timeout_minutes=45).way
        'wait_condition'

    Raises:
        ValueError: a time that CloudFormation does not take.
    """

    way: ReadinessWay
    minutes: int

    def __post_init__(self) -> None:
        most = MOST_MINUTES[self.way]
        if most and not 1 <= self.minutes <= most:
            raise ValueError(f"readiness waits for {self.minutes} minutes. Allowed for {self.way!r}: 1 to {most}.")

    @classmethod
    def none(cls) -> Readiness:
        """The deploy is over when the group exists."""
        return cls(way="none", minutes=0)

    @classmethod
    def signal(cls, *, timeout_minutes: int = DEFAULT_MINUTES) -> Readiness:
        """The group counts as made, or updated, when min_nodes nodes have signalled, each with its own credentials.

        A node whose checks fail fails the deploy. The stack's event then has its id and the step, "i-0123456789abcdef0/check":
        a signal has room for no more.
        """
        return cls(way="signal", minutes=timeout_minutes)

    @classmethod
    def wait_condition(cls, *, timeout_minutes: int = DEFAULT_MINUTES) -> Readiness:
        """The stack waits for min_nodes nodes beside the group. The event of a failure has the reason in full.

        Nodes send it to a presigned URL, which is in their user data and needs no credentials: whoever reads the user data
        can send signals to the stack for a day, and nothing else.
        """
        return cls(way="wait_condition", minutes=timeout_minutes)

    @property
    def duration(self) -> str:
        """The time in ISO 8601, as the policies take it."""
        return f"PT{self.minutes}M"

    def creation_policy(self, *, count: int) -> CfnCreationPolicy | None:
        """The CreationPolicy of the group."""
        if self.way != "signal":
            return None
        return CfnCreationPolicy(resource_signal=CfnResourceSignal(count=count, timeout=self.duration))


class ReadinessGate:
    """What a cluster needs so that its stack can wait: made before its document, and closed after its group."""

    def __init__(self, scope: Construct, readiness: Readiness) -> None:
        self._scope, self._readiness = scope, readiness
        self._handle: CfnWaitConditionHandle | None = None
        self._digest = ""
        self._group = _LogicalId()

    def spec(self, document: RunSpec) -> RunSpec:
        """The document with what nodes have to know.

        A handle takes signals for one deploy only, and no wait condition can be updated: each change of the document has a
        handle, and a condition, of its own. Their names come from what the document is without them.
        """
        stack = Stack.of(self._scope)
        if self._readiness.way == "signal":
            ready = ReadinessSpec(way="signal", stack=stack.stack_name, resource=Lazy.string(self._group))
        elif self._readiness.way == "wait_condition":
            text = json.dumps(stack.resolve(document.to_json()), sort_keys=True)  # references by their names, not their numbers
            self._digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            self._handle = CfnWaitConditionHandle(self._scope, f"ReadyHandle{self._digest}")
            ready = ReadinessSpec(way="wait_condition", url=self._handle.ref)
        else:
            return document
        return replace(document, readiness=ready)

    def close(self, group: autoscaling.CfnAutoScalingGroup, *, role: iam.Role, count: int) -> None:
        """Let nodes signal, and have the stack wait for them.

        Args:
            group: the nodes' group.
            role: of the nodes.
            count: nodes that are waited for.
        """
        self._group.element = group
        if self._readiness.way == "signal":
            stack = Stack.of(self._scope)
            role.add_to_policy(
                iam.PolicyStatement(sid="SignalReady", actions=["cloudformation:SignalResource"], resources=[stack.stack_id])
            )
        elif self._handle is not None:
            condition = CfnWaitCondition(
                self._scope,
                f"Ready{self._digest}",
                count=count,
                handle=self._handle.ref,
                timeout=str(self._readiness.minutes * 60),
            )
            condition.add_dependency(group)


@jsii.implements(IStableStringProducer)
class _LogicalId:
    """The logical id of the group, which is made after the document that names it."""

    element: autoscaling.CfnAutoScalingGroup

    def produce(self) -> str:
        resolved: str = Stack.of(self.element).resolve(self.element.logical_id)
        return resolved
