"""What a resource type is to the engine: its properties, its actions and its values."""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from trainlocal.cloud.clients import Clients
from trainlocal.cloud.resources.schema import Record
from trainlocal.cloud.signals import Signals

NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a resource lives: account, region, stack and its own name in the template."""

    clients: Clients
    account: str
    region: str
    stack_name: str
    stack_id: str
    logical: str
    stack_tags: Mapping[str, str] = field(default_factory=dict)
    update_policy: Mapping[str, Any] = field(default_factory=dict)
    creation_policy: Mapping[str, Any] = field(default_factory=dict)
    signals: Signals = field(default_factory=Signals)

    def client(self, service: str) -> Any:
        """The client of a service in the region of the stack."""
        return self.clients.client(service, self.region)

    @property
    def partition(self) -> str:
        """The AWS partition of the region."""
        return "aws-cn" if self.region.startswith("cn-") else "aws-us-gov" if self.region.startswith("us-gov-") else "aws"

    def arn(self, service: str, resource: str, *, region: bool = True) -> str:
        """The ARN of something of this account."""
        return f"arn:{self.partition}:{service}:{self.region if region else ''}:{self.account}:{resource}"

    def name(self, *, limit: int = 255, lower: bool = False) -> str:
        """A name as CloudFormation makes them up: stack, logical id and a random ending, no longer than ``limit``."""
        ending = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(12))
        room = limit - len(ending) - 2
        stack = self.stack_name[: max(room - len(self.logical), room // 2)]
        name = f"{stack}-{self.logical[: room - len(stack)]}-{ending}"
        return name.lower() if lower else name

    @property
    def system_tags(self) -> dict[str, str]:
        """The tags by which AWS marks what a stack made."""
        return {
            "aws:cloudformation:stack-name": self.stack_name,
            "aws:cloudformation:stack-id": self.stack_id,
            "aws:cloudformation:logical-id": self.logical,
        }

    def tags(self, properties: Mapping[str, Any]) -> dict[str, str]:
        """The tags of the stack, overridden by the resource's own."""
        own = properties.get("Tags", [])
        pairs = own if isinstance(own, dict) else {tag["Key"]: tag["Value"] for tag in own}
        return {**self.stack_tags, **pairs}


class Provider(ABC):
    """One resource type.

    ``schema``: the properties that are emulated; any other fails the deployment by name.
    ``replacing``: those whose change makes CloudFormation replace the resource ("Update requires: Replacement").
    ``attributes``: what Fn::GetAtt may ask for; ``volatile``: those of them that an update in place may change.
    ``name_property``: the property by which users name the resource, if there is one.
    ``update_policies``: the settings of the attribute UpdatePolicy.
    ``creation_policies``: those of the attribute CreationPolicy.
    ``makes_identities``: whether the IAM capabilities are needed.
    """

    type: ClassVar[str]
    schema: ClassVar[Record]
    replacing: ClassVar[frozenset[str]] = NOTHING
    attributes: ClassVar[frozenset[str]] = NOTHING
    name_property: ClassVar[str | None] = None
    volatile: ClassVar[frozenset[str]] = NOTHING
    update_policies: ClassVar[Mapping[str, frozenset[str]]] = {}
    creation_policies: ClassVar[Mapping[str, frozenset[str]]] = {}
    makes_identities: ClassVar[bool] = False

    @abstractmethod
    def create(self, place: Place, properties: dict[str, Any]) -> str:
        """Makes the resource and returns its physical id."""

    def settle(self, place: Place, properties: dict[str, Any]) -> None:  # noqa: B027 - most types wait for nothing
        """Waits, when the resource is made, for what must come before it counts as such. Raises when that does not come."""

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        """Changes the resource in place."""
        raise ValueError(f"{self.type} cannot be changed in place by the emulation; it can only be replaced")

    @abstractmethod
    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        """Removes the resource. What is gone already (a "not found" of the API) counts as removed."""

    def reference(self, place: Place, physical_id: str, properties: dict[str, Any]) -> str:
        """What ``Ref`` gives."""
        return physical_id

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        """What ``Fn::GetAtt`` gives for one of ``attributes``."""
        raise AssertionError(f"{self.type} declares no attribute {name}")

    def needs_replacement(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
        """True when a change of properties cannot be made in place."""
        return any(before.get(name) != after.get(name) for name in self.replacing)


@contextmanager
def undone_on_error(undo: Callable[[], Any]) -> Iterator[None]:
    """Takes back the first of several calls that make a resource when one of the others fails."""
    try:
        yield
    except Exception:
        undo()
        raise


_providers: dict[str, Provider] = {}


def provides(provider: type[Provider]) -> type[Provider]:
    """Class decorator: makes a resource type known to the engine."""
    assert provider.type not in _providers, provider.type
    _providers[provider.type] = provider()
    return provider


def provider_of(type: str) -> Provider | None:
    """The provider of a resource type; None when the type is not emulated."""
    return _providers.get(type)


def emulated_types() -> list[str]:
    """Every emulated resource type."""
    return sorted(_providers)
