"""Private addresses on loopback, for nodes that are plain processes of this machine and have no network of their own.

Such nodes cannot have the addresses of their subnet, yet they find each other through DescribeInstances. So the account
gives instances loopback addresses instead: on Linux, where all of 127.0.0.0/8 is local, one an instance, from a block of
256 chosen at random for this account so that two accounts on one machine do not meet; elsewhere 127.0.0.1 for all.
"""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

from moto.ec2.models.instances import Instance

from trainlocal.cloud.services import launches


def install() -> None:
    """Gives every instance that a group launches from now on an address on loopback."""
    launch = launches.launch_instance
    addresses = _addresses()

    def launch_on_loopback(group: Any, tags: dict[str, str]) -> Instance:
        instance = launch(group, tags)
        interface = instance.nics[0]
        interface.private_ip_address = next(addresses)
        interface.private_ip_addresses = [{"Primary": True, "PrivateIpAddress": interface.private_ip_address}]
        return instance

    launches.launch_instance = launch_on_loopback


def _addresses() -> itertools.cycle[str]:
    if not sys.platform.startswith("linux"):
        return itertools.cycle(["127.0.0.1"])
    block = f"127.{random.randint(1, 254)}.{random.randint(0, 255)}"
    return itertools.cycle([f"{block}.{last}" for last in range(4, 255)])
