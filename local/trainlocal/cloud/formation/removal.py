"""Removes resources, those first that need others."""

from __future__ import annotations

from collections.abc import Callable

from botocore.exceptions import BotoCoreError, ClientError

from trainlocal.cloud.formation.graph import in_order
from trainlocal.cloud.formation.stack import Intent, Resource, Stack
from trainlocal.cloud.formation.surroundings import LiveSurroundings, provider_for

_GONE = ("NotFound", "NoSuch", "NonExist", "DoesNotExist", "ResourceNotFoundException", "Unknown")
_KEEPING = ("Retain", "RetainExceptOnCreate", "Snapshot")


class Removal:
    """Removes resources of one stack."""

    def __init__(self, stack: Stack, surroundings: LiveSurroundings, intent: Intent) -> None:
        self._stack = stack
        self._surroundings = surroundings
        self._intent = intent

    def remove(self, resources: list[Resource], *, policy: Callable[[Resource], str], creating: bool = False) -> list[Resource]:
        """Removes resources, or leaves them where their policy says so; returns those that could not be removed.

        What a failed one still needs is not touched. ``creating`` is true when their creation is being taken back, which
        "RetainExceptOnCreate" makes a difference of.
        """
        failed: list[Resource] = []
        for resource in _last_made_first(resources):
            if any(resource.logical in other.needs for other in failed):
                failed.append(resource)
                self._record(resource, "DELETE_FAILED", f"Resource deletion cancelled: {failed[0].logical} still needs it")
            elif not self._remove(resource, policy(resource), creating):
                failed.append(resource)
            elif self._stack.resources.get(resource.logical) is resource:
                del self._stack.resources[resource.logical]
        return failed

    def _remove(self, resource: Resource, policy: str, creating: bool) -> bool:
        if policy in _KEEPING and resource.physical_id and not (creating and policy == "RetainExceptOnCreate"):
            self._record(resource, "DELETE_SKIPPED")
            return True
        self._record(resource, "DELETE_IN_PROGRESS")
        if resource.physical_id:
            provider = provider_for(resource.type)
            place = self._surroundings.place(resource.logical, self._intent)
            try:
                provider.delete(place, resource.physical_id, provider.schema.convert(resource.properties, resource.logical))
            except ClientError as error:
                if not any(mark in error.response["Error"]["Code"] for mark in _GONE):
                    details = error.response["Error"]
                    self._record(resource, "DELETE_FAILED", f"{details['Message']} (Error Code: {details['Code']})")
                    return False
            except (BotoCoreError, ValueError) as error:
                self._record(resource, "DELETE_FAILED", str(error))
                return False
        self._record(resource, "DELETE_COMPLETE")
        return True

    def _record(self, resource: Resource, status: str, reason: str | None = None) -> None:
        self._stack.record(resource, status, reason=reason, token=self._intent.token)


def _last_made_first(resources: list[Resource]) -> list[Resource]:
    """Each before what it needs. Two of one name (a replacement and its predecessor) keep their given order."""
    logicals = {resource.logical for resource in resources}
    order = in_order({resource.logical: resource.needs & logicals - {resource.logical} for resource in resources})
    return sorted(resources, key=lambda resource: -order.index(resource.logical))
