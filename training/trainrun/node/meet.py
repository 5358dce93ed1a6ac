"""Find the peers and agree on the node that hosts the rendezvous."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from botocore.exceptions import BotoCoreError, ClientError

from trainrun.node.beacon import answers
from trainrun.node.claims import Claim, Claims
from trainrun.node.group import Group, View
from trainrun.node.metadata import Identity
from trainrun.node.outcome import Leave, StepFailed
from trainrun.spec_cluster import ClusterSpec
from trainrun.store import StoreError

POLL_SECONDS = 0.5
SLOWEST_POLL_SECONDS = 5.0
"""What the pause between two looks grows to: a loss is over in seconds, a lack of capacity lasts for hours."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What the nodes agreed on."""

    claim: Claim
    in_service: int
    """Nodes in service, this one included."""
    expected: int
    """Nodes that the group wants to have."""


class Silence:
    """For how long the newest host has not been heard of."""

    def __init__(self) -> None:
        self._generation = 0
        self._since: float | None = None

    def seconds(self, claim: Claim) -> float:
        """0 when the host's agent answers, else the seconds since it was first found silent under this claim."""
        if answers(claim.address, claim.beacon):
            self._since = None
            return 0.0
        if self._since is None or self._generation != claim.generation:
            self._generation, self._since = claim.generation, time.monotonic()
        return time.monotonic() - self._since


class Absence:
    """Nodes in service that do not come, as seen by the host: what is in service may be stopped, or not fit, and never come."""

    def __init__(self, *, patience: float) -> None:
        """Args:
        patience: for how long those in service are waited for.
        """
        self._patience = patience
        self._short_since: float | None = None
        self.nodes: set[str] = set()
        """Those that are waited for no longer."""

    @property
    def is_awaited(self) -> bool:
        """Whether somebody is still waited for."""
        return self._short_since is not None

    def begin(self) -> None:
        """Begin to wait for those that are to come to a new claim."""
        self._short_since = time.monotonic()

    def look(self, *, wanted: int, came: set[str], in_service: set[str]) -> None:
        """Note who has come to a claim.

        Args:
            wanted: how many nodes it is for.
            came: those that have followed it, this one included.
            in_service: those that could.
        """
        self.nodes &= in_service - came
        if len(came & in_service) >= wanted:
            self._short_since = None
            return
        if self._short_since is None:
            self._short_since = time.monotonic()
        if time.monotonic() - self._short_since >= self._patience:
            self._short_since = None
            self.nodes |= in_service - came


class Meet:
    """How one node meets its peers, at first and after each loss."""

    def __init__(
        self,
        *,
        identity: Identity,
        port: int,
        beacon: int,
        group: Group,
        claims: Claims,
        cluster: ClusterSpec,
        peer_lost: float,
        rendezvous: float = 600.0,
        ended: Callable[[], str],
        broken: Callable[[], str] = lambda: "",
        leave_if_asked: Callable[[], None] = lambda: None,
        report: Callable[[str], None] = log.info,
    ) -> None:
        """Args:
        identity: this node.
        port: where its torchrun would host the rendezvous.
        beacon: where its agent shows that it is alive.
        group: its Auto Scaling group.
        claims: the run's claims.
        cluster: how many nodes can train together.
        peer_lost: seconds of silence after which a host that is still listed counts as lost.
        rendezvous: seconds for which nodes that are in service are counted on to come.
        ended: why the run is over, or "" while it is not.
        broken: why it is over without having succeeded, or "".
        leave_if_asked: raises `Leave` when this node was given notice.
        report: is told from time to time what is waited for.
        """
        self._identity = identity
        self._port = port
        self._beacon = beacon
        self._group = group
        self._claims = claims
        self._cluster = cluster
        self._peer_lost = peer_lost
        self._ended = ended
        self._broken = broken
        self._leave_if_asked = leave_if_asked
        self._report = report
        self._met = False
        self._absence = Absence(patience=rendezvous)

    def wait(self, *, timeout: float) -> Meeting:
        """Wait until enough nodes are in service and a live one of them hosts the rendezvous.

        Requests that fail are tried again: a node outlives a bad hour of a service. The time runs out only on a run whose nodes
        have never met, where a setting may be wrong. One that has begun waits on, and tells each ``timeout`` seconds for what.

        Raises:
            Leave: the run has ended, or the group lets this node go.
            StepFailed: not met in time.
        """
        began = time.monotonic()
        deadline = began + timeout
        silence = Silence()
        problem = ""
        while True:
            if time.monotonic() >= deadline:
                if not self._has_met():
                    raise StepFailed(f"The nodes did not meet within {timeout:g} s (timeouts.meet). {problem}")
                waited = time.monotonic() - began
                self._report(f"The nodes have not met for {waited:.0f} s. The run has begun, so that they wait on. {problem}")
                deadline = time.monotonic() + timeout
            self._leave_if_asked()
            try:
                found = self._try(silence)
            except (BotoCoreError, ClientError, StoreError) as error:
                found = f"A request failed: {error}"
            if isinstance(found, Meeting):
                self._met = True
                return found
            if found != problem:
                log.info("Waiting. %s", found)
            problem = found
            time.sleep(min(SLOWEST_POLL_SECONDS, max(POLL_SECONDS, (time.monotonic() - began) / 20)))

    def lost(self, meeting: Meeting, silence: Silence) -> str:
        """Why the nodes must meet anew although torchrun goes on, or "".

        Raises:
            botocore.exceptions.BotoCoreError, ClientError, StoreError: a request failed; nothing is known.
        """
        if broken := self._broken():
            return broken
        newest = self._claims.newest()
        if newest is not None and newest.generation > meeting.claim.generation:
            follows = f"{newest.node} hosts it now" if newest.node else "it resigned"
            return f"The rendezvous host {meeting.claim.node} is no more: {follows}."
        view = self._group.look()
        if view is not None and self._is_usable(meeting.claim, view, silence) == "no":
            return f"The rendezvous host {meeting.claim.node} is gone."
        return self._more(meeting.claim, view) if view is not None and meeting.claim.nodes else ""

    def _more(self, claim: Claim, view: View) -> str:
        """Why this host is to let more nodes train together than do, or ""."""
        if claim.node != self._identity.node:
            return ""
        if claim.nodes == self._cluster.usable(len(view.in_service())) and not self._absence.is_awaited:
            return ""
        came = self._claims.who_came(claim)
        self._absence.look(wanted=claim.nodes, came=came, in_service=view.in_service())
        ready = came & view.in_service()
        if self._cluster.usable(len(ready)) <= claim.nodes:
            return ""
        return f"{len(ready)} nodes are ready, of which {self._cluster.usable(len(ready))} can train together: {claim.nodes} did."

    def resign(self) -> None:
        """Give the rendezvous up if this node hosts it, so that the others need not wait for it to be missed.

        Returns at once and is done beside: the ranks are saving meanwhile, and a slow store must not hold them up.
        """
        threading.Thread(target=self._resign, name="resign", daemon=True).start()

    def _has_met(self) -> bool:
        """Whether nodes of this run have ever met; True, too, where the store does not tell: it could take no result either."""
        try:
            self._met = self._met or self._claims.newest() is not None
        except StoreError:
            return True
        return self._met

    def _try(self, silence: Silence) -> Meeting | str:
        """One attempt: the meeting, or what is waited for."""
        view = self._group.look()
        if view is None:
            return f"{self._identity.node} is in no Auto Scaling group (yet). Nodes find each other through their group."
        if ended := self._ended():
            raise Leave(ended)
        if view.desired == 0 or not view.holds(self._identity.node):
            state = view.lifecycle.get(self._identity.node, "not in the group")
            raise Leave(f"The group {view.name} lets this node go (capacity {view.desired}, this node: {state}).")
        present = view.in_service() | {self._identity.node}
        size = self._cluster.usable(len(present))
        if not size:
            among = (
                f" (the batch divides among {', '.join(map(str, self._cluster.nodes_usable))})"
                if self._cluster.nodes_usable
                else ""
            )
            return (
                f"{len(present)} of at least {self._cluster.usable_from} nodes are in service in {view.name}{among}. "
                "See the group's activity history for why the others do not come (capacity, quota, reservation)."
            )
        claim = self._claims.newest()
        usable = self._is_usable(claim, view, silence) if claim else "no"
        if claim is not None and usable == "unknown":
            return (
                f"The rendezvous host {claim.node} does not answer on {claim.address}:{claim.beacon}. "
                "If it is alive, does the security group allow all traffic between its own members, in and out?"
            )
        is_own = claim is not None and claim.node == self._identity.node
        nodes = self._size(claim if is_own and usable == "yes" else None, present) if self._cluster.nodes_usable else 0
        if claim is None or usable == "no" or (is_own and claim.nodes != nodes):
            claim = self._own_claim(claim.generation + 1 if claim else 1, nodes=nodes)
            if not self._claims.take(claim):
                return "Another node was faster to claim the rendezvous; its claim is read next."
            self._absence.begin()
        if claim.nodes:
            self._claims.come(claim, node=self._identity.node)
        return Meeting(claim=claim, in_service=len(present), expected=max(view.desired, len(present)))

    def _size(self, claim: Claim | None, present: set[str]) -> int:
        """How many nodes a claim of this node's is for: of those present, but for those that have not come for long.

        Args:
            claim: this node's last one, if it holds.
            present: the nodes in service, this one included.
        """
        if claim is not None and claim.nodes:
            came = self._claims.who_came(claim) | {self._identity.node}
            self._absence.look(wanted=claim.nodes, came=came, in_service=present)
        # Too few without the absent: all are waited for.
        return self._cluster.usable(len(present - self._absence.nodes)) or self._cluster.usable(len(present))

    def _resign(self) -> None:
        try:
            newest = self._claims.newest()
            if newest is not None and newest.node == self._identity.node:
                self._claims.take(Claim(generation=newest.generation + 1, node="", address="", port=0, beacon=0))
        except StoreError:
            log.exception("The rendezvous could not be given up; the others will miss this node.")

    def _is_usable(self, claim: Claim, view: View, silence: Silence) -> Literal["yes", "no", "unknown"]:
        """Whether the claim's host is alive: "yes", "no", or "unknown" while it has not been silent for long."""
        if claim.node == self._identity.node:
            return (
                "yes" if claim == self._own_claim(claim.generation, nodes=claim.nodes) else "no"
            )  # an agent before this one claimed it
        if not view.holds(claim.node):
            return "no"
        seconds = silence.seconds(claim)
        return "yes" if not seconds else "unknown" if seconds < self._peer_lost else "no"

    def _own_claim(self, generation: int, *, nodes: int) -> Claim:
        return Claim(
            generation=generation,
            node=self._identity.node,
            address=self._identity.address,
            port=self._port,
            beacon=self._beacon,
            nodes=nodes,
        )
