"""What the nodes tell each other around one launch of mpirun: small objects in the run's folder, as the claims are.

mpirun runs on the node that hosts the rendezvous and has to start a daemon on each other node. It is usually given ssh
for that: keys, users and a server that runs commands for whoever holds a key. Here the nodes have a channel already that
only they can write, the bucket. A node that is ready puts down a ticket; the host answers the ticket with the arguments
that mpirun wants its daemon to have; the node starts its own Open MPI's daemon with them, and nothing else.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from trainrun.store import Store, StoreKeyMissing


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """A node that is ready for the next launch."""

    key: str
    """Never used twice; of one node's, the newest is the largest."""
    node: str
    """Instance id."""
    address: str
    beacon: int
    """Port on which the node's agent shows that it is alive."""

    @classmethod
    def new(cls, *, node: str, address: str, beacon: int) -> Ticket:
        return cls(key=f"{node}.{time.time_ns():020d}", node=node, address=address, beacon=beacon)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the host answers to a ticket."""

    launch: str
    """Under what key the verdict will be."""
    arguments: list[str]
    """Of the daemon."""
    variables: dict[str, str] = field(default_factory=dict)
    """Where Open MPI lies, where the daemon would not know (`mpi_command.only_prefixes`)."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a launch ended, from all its nodes' ranks."""

    exit_code: int
    explanation: str


class Board:
    """The board of one claim: whoever follows another host uses another."""

    def __init__(self, *, store: Store, generation: int) -> None:
        """Args:
        store: the run's folder; what is put down is mpi/<generation>/...
        generation: the claim's.
        """
        self._store = store.child(f"mpi/{generation:08d}")

    def put_ticket(self, ticket: Ticket) -> None:
        """Say that a node is ready."""
        self._store.put(f"tickets/{ticket.key}", json.dumps(asdict(ticket)).encode())

    def withdraw(self, ticket: Ticket) -> None:
        """Take a ticket back."""
        self._store.delete([f"tickets/{ticket.key}"])

    def waiting(self) -> list[Ticket]:
        """The newest ticket of each node, where it has not been answered."""
        newest = {key.rpartition(".")[0]: key for key in self._keys("tickets/")}
        unanswered = set(newest.values()) - set(self._keys("daemons/"))
        tickets = (self._get(f"tickets/{key}") for key in sorted(unanswered))
        return [Ticket(**ticket) for ticket in tickets if ticket is not None]

    def answer(self, ticket: Ticket, answer: Answer) -> None:
        """Have a node start its daemon."""
        self._store.put(f"daemons/{ticket.key}", json.dumps(asdict(answer)).encode())

    def answered(self, ticket: Ticket) -> Answer | None:
        """What the host has answered, or None while it has not."""
        found = self._get(f"daemons/{ticket.key}")
        return None if found is None else Answer(**found)

    def put_exit_codes(self, ticket: Ticket, codes: list[int]) -> None:
        """Say how a node's ranks ended."""
        self._store.put(f"exit-codes/{ticket.key}", json.dumps(codes).encode())

    def exit_codes(self, ticket: Ticket) -> list[int] | None:
        """How a node's ranks ended, or None while it has not said."""
        codes: list[int] | None = self._get(f"exit-codes/{ticket.key}")
        return codes

    def put_verdict(self, launch: str, verdict: Verdict) -> None:
        """Say how a launch ended."""
        self._store.put(f"verdicts/{launch}", json.dumps(asdict(verdict)).encode())

    def verdict(self, launch: str) -> Verdict | None:
        """How a launch ended, or None while the host has not said."""
        found = self._get(f"verdicts/{launch}")
        return None if found is None else Verdict(**found)

    def _keys(self, prefix: str) -> list[str]:
        return [stored.key.removeprefix(prefix) for stored in self._store.list(prefix)]

    def _get(self, key: str) -> Any:
        """What was put down there, or None."""
        try:
            return json.loads(self._store.get(key))
        except StoreKeyMissing:
            return None
