"""Starts one isolated node; a process of its own: `python -m trainlocal.fleet.boot` inside the fleet's namespaces.

It makes the node's network and hands two sockets that are bound there (metadata, names) to the fleet, builds the
node's root, and forks PID 1 of the node, whose parent it stays: the node ends when this process does, and the reverse.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from trainlocal.fleet import image, netlink
from trainlocal.fleet import namespaces as ns

BRIDGE = "cloud0"
METADATA_ADDRESS = ("169.254.169.254", 80)
NAME_SERVER_ADDRESS = (image.NAME_SERVER, 53)
CONSOLE = "console.log"


@dataclass(frozen=True, kw_only=True)
class BootOrder:
    """All that the starting process has to know. `init` is the command line of PID 1."""

    instance_id: str
    hostname: str
    address: str
    prefix: int
    mac: str
    interface: str
    mount_point: str
    layer: str
    logs: str
    cgroup: str
    init: list[str]
    environment: dict[str, str]
    volumes: list[str]
    shared: str

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


def _make_network(order: BootOrder) -> list[socket.socket]:
    """Leave for a new network namespace that is wired to the bridge; return the sockets bound in it."""
    outside = os.open("/proc/self/ns/net", os.O_RDONLY)
    ns.unshare(ns.CLONE_NEWNET)
    inside = os.open("/proc/self/ns/net", os.O_RDONLY)
    ns.enter(outside, ns.CLONE_NEWNET)
    netlink.add_veth(order.interface, BRIDGE, "eth0", inside, bytes.fromhex(order.mac.replace(":", "")))
    ns.enter(inside, ns.CLONE_NEWNET)
    os.close(outside)
    os.close(inside)
    for interface in ("lo", "eth0"):
        netlink.set_up(interface)
    netlink.add_address("eth0", order.address, order.prefix)
    netlink.add_default_route("eth0")
    for address, _ in (METADATA_ADDRESS, NAME_SERVER_ADDRESS):
        netlink.add_address("lo", address, 32)
    metadata = socket.create_server(METADATA_ADDRESS, backlog=64)
    names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    names.bind(NAME_SERVER_ADDRESS)
    return [metadata, names]


def _become_first_process(order: BootOrder, root: Path) -> None:
    """As PID 1 of the node: finish its namespaces, change root and become its init."""
    ns.die_with_parent()
    if order.cgroup:
        Path(order.cgroup, "cgroup.procs").write_text("0")
        ns.unshare(ns.CLONE_NEWCGROUP)
    image.mount_kernel_interfaces(root, with_cgroups=bool(order.cgroup))
    console = os.open(Path(order.logs) / CONSOLE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    ns.set_hostname(order.hostname)
    ns.pivot_root(root)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(console, 1)
    os.dup2(console, 2)
    os.closerange(3, 256)
    os.setsid()
    os.umask(0o022)
    os.execve(order.init[0], order.init, order.environment)


def start(order: BootOrder, fleet: socket.socket) -> int:
    """Start the node, tell the fleet on its socket, wait for the node's end and return PID 1's exit status."""
    ns.die_with_parent()
    sockets = _make_network(order)
    ns.unshare(ns.CLONE_NEWNS | ns.CLONE_NEWUTS | ns.CLONE_NEWIPC | ns.CLONE_NEWPID)
    root = image.build(
        Path(order.mount_point),
        layer=Path(order.layer),
        instance_id=order.instance_id,
        logs=Path(order.logs),
        environment=order.environment,
        volumes=order.volumes,
        shared=Path(order.shared),
    )
    first = os.fork()
    if first == 0:
        try:
            _become_first_process(order, root)
        except BaseException as error:
            os.write(2, f"trainlocal: the node's first process could not start: {error!r}\n".encode())
        finally:
            os._exit(70)
    socket.send_fds(fleet, [str(first).encode()], [one.fileno() for one in sockets])
    for one in (*sockets, fleet):
        one.close()
    _, status = os.waitpid(first, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    sys.exit(start(BootOrder(**json.loads(sys.argv[1])), socket.socket(fileno=int(sys.argv[2]))))
