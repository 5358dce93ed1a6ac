"""What expressions of a stack see: its live resources, the exports of others, the zones, the parameter store."""

from __future__ import annotations

from typing import Any

from botocore.exceptions import ClientError

from trainlocal.cloud.clients import Clients
from trainlocal.cloud.formation.exports import Exports
from trainlocal.cloud.formation.faults import FormationError
from trainlocal.cloud.formation.stack import Intent, Resource, Stack
from trainlocal.cloud.resources import Place, Provider, provider_of

ACCOUNT = "123456789012"


def read_parameter(clients: Clients, region: str, name: str) -> str:
    """The value of an SSM parameter; raises ``FormationError`` when there is none."""
    try:
        value: str = clients.client("ssm", region).get_parameter(Name=name, WithDecryption=False)["Parameter"]["Value"]
    except ClientError as error:
        raise FormationError(f"Unable to fetch parameters [{name}] from parameter store for this account.") from error
    return value


def provider_for(type: str) -> Provider:
    """The provider of a type that the template check has let through."""
    provider = provider_of(type)
    assert provider is not None, type
    return provider


class LiveSurroundings:
    """The surroundings of a stack as it is now."""

    def __init__(self, clients: Clients, stack: Stack, exports: Exports) -> None:
        self._clients = clients
        self._stack = stack
        self._exports = exports
        self.used_imports: set[str] = set()
        self._zones: dict[str, list[str]] = {}

    def place(self, logical: str, intent: Intent) -> Place:
        """Where a resource of the stack lives."""
        declaration = intent.template.declarations.get(logical)
        return Place(
            clients=self._clients,
            account=ACCOUNT,
            region=self._stack.region,
            stack_name=self._stack.name,
            stack_id=self._stack.identifier,
            logical=logical,
            stack_tags=intent.tags,
            update_policy=declaration.update_policy if declaration else {},
            creation_policy=declaration.creation_policy if declaration else {},
            signals=self._stack.signals,
        )

    def reference(self, logical: str) -> Any:
        """The ``Ref`` of a live resource."""
        resource, provider, place, properties = self._live(logical)
        return provider.reference(place, resource.physical_id, properties)

    def attribute(self, logical: str, name: str) -> Any:
        """The ``Fn::GetAtt`` of a live resource."""
        resource, provider, place, properties = self._live(logical)
        if name not in provider.attributes:
            raise FormationError(f"Template error: {resource.type} {logical} has no emulated attribute {name}")
        return provider.attribute(place, resource.physical_id, properties, name)

    def imported(self, name: str) -> str:
        """The value of an export of another stack."""
        self.used_imports.add(name)
        return self._exports.value(name)

    def zones(self, region: str) -> list[str]:
        """The availability zones of a region."""
        if region not in self._zones:
            answer = self._clients.client("ec2", region).describe_availability_zones()["AvailabilityZones"]
            self._zones[region] = [zone["ZoneName"] for zone in answer if zone.get("ZoneType") == "availability-zone"]
        return self._zones[region]

    def parameter_of_store(self, name: str) -> str:
        """The value of an SSM parameter."""
        return read_parameter(self._clients, self._stack.region, name)

    def _live(self, logical: str) -> tuple[Resource, Provider, Place, dict[str, Any]]:
        resource = self._stack.resources.get(logical)
        if resource is None or not resource.physical_id:
            raise FormationError(f"Template error: the resource {logical} does not exist; is its condition false?")
        assert self._stack.intent is not None
        provider = provider_for(resource.type)
        properties = provider.schema.convert(resource.properties, logical)
        return resource, provider, self.place(logical, self._stack.intent), properties
