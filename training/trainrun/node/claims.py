"""Which node hosts the rendezvous: a chain of claims in the run's folder, of which the newest holds.

A claim is an object that is only ever created (If-None-Match: *), so of several nodes that want to be the next
host exactly one succeeds and all others see whom. This needs no clock, no agreed view of the group and no host
that is alive, and it stays put: a newcomer follows the newest claim however old or young it is itself.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict, dataclass, fields

from trainrun.store import Store

KEY = re.compile(r"(\d{8})\.json")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One node's claim to host the rendezvous."""

    generation: int
    node: str
    """Instance id; empty when the host before has resigned, which is for anyone to follow up."""
    address: str
    port: int
    """Where torchrun's store listens."""
    beacon: int
    """Port on which the host's agent shows that it is alive."""
    nodes: int = 0
    """How many nodes train together; 0 leaves it to those who come."""


class Claims:
    """The claims of one run."""

    def __init__(self, *, store: Store) -> None:
        """Args:
        store: the run's folder; claims are rendezvous/<generation>.json.
        """
        self._store, self._ready = store.child("rendezvous"), store.child("ready")

    def newest(self) -> Claim | None:
        """The claim that holds, or None before the first. What cannot be read as one counts as a host that has resigned.

        Raises:
            StoreError: the store did not answer.
        """
        keys = [stored.key for stored in self._store.list() if KEY.fullmatch(stored.key)]
        if not keys:
            return None
        key = max(keys)
        generation = int(key.removesuffix(".json"))
        try:
            return _claim_of(self._store.get(key), generation)
        except (ValueError, TypeError) as error:
            log.warning("%s is no claim (%s); whoever comes first follows it up.", self._store.locate(key), error)
            return Claim(generation=generation, node="", address="", port=0, beacon=0)

    def come(self, claim: Claim, *, node: str) -> None:
        """Show that a node is there and follows a claim.

        Raises:
            StoreError: the store did not answer.
        """
        self._ready.put(f"{claim.generation:08d}/{node}", b"")

    def who_came(self, claim: Claim) -> set[str]:
        """The nodes that have followed a claim: also those that could not take part.

        Raises:
            StoreError: the store did not answer.
        """
        folder = f"{claim.generation:08d}/"
        return {stored.key.removeprefix(folder) for stored in self._ready.list(folder)}

    def take(self, claim: Claim) -> bool:
        """Put down a claim; False when another node was faster.

        Raises:
            StoreError: the store did not answer.
        """
        return self._store.put_new(f"{claim.generation:08d}.json", json.dumps(asdict(claim)).encode())


def _claim_of(text: bytes, generation: int) -> Claim:
    """The claim in an object. Fields that it does not know, of an agent newer than this, are left out.

    Raises:
        ValueError, TypeError: it is none.
    """
    found = json.loads(text)
    if not isinstance(found, dict):
        raise TypeError(f"it is {type(found).__name__}")
    known = {field.name: found[field.name] for field in fields(Claim) if field.name in found}
    return Claim(**{**known, "generation": generation})
