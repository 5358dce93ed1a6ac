"""The end of the Capacity Block that a node is in: the whole run saves and stops before EC2 starts to end instances."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from trainrun.node.notices import Ask, Notice, Now, utc_now
from trainrun.spec_cluster import ClusterSpec, nodes_save, terminations_begin

ASK_SECONDS = 600.0
"""How often EC2 is asked while nothing names the end: a block may be prolonged."""
ASK_AGAIN_SECONDS = 30.0
"""How soon after a question that failed."""

Find = Callable[[], datetime | None]
"""Finds out when the node's Capacity Block ends; None when it is in none."""


class CapacityBlockEnd:
    """A notice that nobody gives: the moment is known beforehand."""

    def __init__(self, cluster: ClusterSpec, *, stop_grace: float, find: Find, now: Now = utc_now) -> None:
        """Args:
        cluster: names the end, if the cluster was made with it.
        stop_grace: seconds that the ranks have for the last checkpoint.
        find: asks EC2, where the cluster does not name it.
        now: the moment.
        """
        self._type, self._stop_grace = cluster.instance_type, stop_grace
        self._given = bool(cluster.capacity_ends)
        self._ends = datetime.fromisoformat(cluster.capacity_ends) if self._given else None
        self._find, self._now = find, now
        self._ask_at = 0.0
        self._told: datetime | None = None
        self._over = False

    def look(self, _: Ask) -> Iterator[Notice]:
        """Raises:
        botocore.exceptions.BotoCoreError, ClientError: EC2 could not be asked; what was known before still counts.
        """
        problem = None
        if not self._given and time.monotonic() >= self._ask_at:
            try:
                self._ends = self._find()
                self._ask_at = time.monotonic() + ASK_SECONDS
            except (BotoCoreError, ClientError) as error:
                problem, self._ask_at = error, time.monotonic() + ASK_AGAIN_SECONDS
        if self._ends is not None and not self._over:
            yield from self._look_at(self._ends)
        if problem is not None:
            raise problem

    def _look_at(self, ends: datetime) -> Iterator[Notice]:
        begins = terminations_begin(ends, instance_type=self._type)
        saves = nodes_save(ends, instance_type=self._type, stop_grace=self._stop_grace)
        text = f"the Capacity Block ends at {_text(ends)}, and EC2 starts to end its instances at {_text(begins)}"
        if self._now() >= saves:
            self._over = True
            yield Notice(text=text, wish="end the run", seconds=max(0.0, (begins - self._now()).total_seconds()) or None)
        elif self._told != ends:
            self._told = ends
            yield Notice(text=f"{text}; the run saves and stops at {_text(saves)}")


def capacity_block_end(*, node: str, region: str) -> Find:
    """Asks EC2 for the end of the Capacity Block that an instance is in."""
    return partial(_find, node=node, region=region)


def _find(*, node: str, region: str) -> datetime | None:
    config = Config(connect_timeout=3, read_timeout=10, retries={"mode": "standard", "total_max_attempts": 2})
    client = boto3.session.Session().client("ec2", region_name=region, config=config)
    instances = [i for r in client.describe_instances(InstanceIds=[node])["Reservations"] for i in r["Instances"]]
    reservation = instances[0].get("CapacityReservationId") if instances else None
    if not reservation:
        return None
    found = client.describe_capacity_reservations(CapacityReservationIds=[reservation])["CapacityReservations"]
    # The end of an ordinary reservation ends no instance: they go on, on demand.
    return found[0].get("EndDate") if found and found[0].get("ReservationType") == "capacity-block" else None


def _text(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
