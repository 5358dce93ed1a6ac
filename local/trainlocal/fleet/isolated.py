"""The isolated tiers: a private world for the fleet (user, mount, network, PID, IPC and UTS namespaces) and its nodes."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType

from trainlocal.fleet import boot, cgroups, image, netlink
from trainlocal.fleet import namespaces as ns
from trainlocal.fleet.dns import NameServer
from trainlocal.fleet.fleet import NodeCommand
from trainlocal.fleet.imds import MetadataServer, items_of
from trainlocal.fleet.instances import Instance
from trainlocal.fleet.packages import HOST_SYSTEMD

# An address for AWS itself, out of the range that carriers share (RFC 6598), which no VPC here uses.
CLOUD_ADDRESS = ("100.64.0.1", 5000)
CLOUD_MAC = bytes.fromhex("02ffffffffff")
_READY = "run/cloud-init/result.json"


def _identity_map(path: str) -> str:
    """Every id that exists here, mapped to itself."""
    ranges = (line.split() for line in Path(path).read_text().splitlines())
    return "".join(f"{first} {first} {count}\n" for first, _, count in ranges)


def enter_world() -> None:
    """Leave for new namespaces of every kind; returns in their first process (PID 1), whose end ends all in them.

    The process that called stays behind as the parent, passes SIGTERM on as SIGKILL, and exits when PID 1 does,
    which is when the kernel has cleared the whole namespace.
    """
    if os.geteuid() == 0:
        user_map, group_map = _identity_map("/proc/self/uid_map"), _identity_map("/proc/self/gid_map")
    else:
        user_map, group_map = f"0 {os.geteuid()} 1\n", f"0 {os.getegid()} 1\n"
    ns.unshare_user(user_map, group_map)
    ns.unshare(ns.CLONE_NEWNS | ns.CLONE_NEWNET | ns.CLONE_NEWPID | ns.CLONE_NEWIPC | ns.CLONE_NEWUTS)
    ns.die_with_parent()
    first = os.fork()
    if first != 0:
        _stay_behind(first)
    ns.die_with_parent()
    ns.mount("none", "/", flags=ns.MS_REC | ns.MS_PRIVATE)
    ns.mount("proc", "/proc", "proc", ns.MS_NOSUID | ns.MS_NODEV | ns.MS_NOEXEC)
    netlink.set_up("lo")
    netlink.add_bridge(boot.BRIDGE, CLOUD_MAC)
    netlink.add_address(boot.BRIDGE, CLOUD_ADDRESS[0], 32)
    netlink.add_default_route(boot.BRIDGE)


def _stay_behind(first: int) -> None:
    def end(number: int, frame: FrameType | None) -> None:
        os.kill(first, signal.SIGKILL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)  # the pipe whose end means "end" is for PID 1
    _, status = os.waitpid(first, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


class IsolatedNode:
    """A node in namespaces of its own, booted from its instance's user data by cloud-init."""

    def __init__(
        self,
        instance: Instance,
        *,
        number: int,
        folder: Path,
        mount_point: Path,
        layer: Path,
        cgroup: Path | None,
        shared: Path,
        environment: dict[str, str],
    ) -> None:
        """Start to boot. `folder` (outside) gets the logs; `cgroup`, where there is one, is the group of all nodes."""
        self._cgroup = cgroup / instance.id if cgroup else None
        if self._cgroup:
            self._cgroup.mkdir()
        folder.mkdir(parents=True, exist_ok=True)
        systemd = HOST_SYSTEMD if HOST_SYSTEMD.exists() else Path("/lib/systemd/systemd")
        order = boot.BootOrder(
            instance_id=instance.id,
            hostname=instance.hostname,
            address=instance.address,
            prefix=instance.prefix,
            mac=instance.mac,
            interface=f"node{number}",
            mount_point=str(mount_point),
            layer=str(layer),
            logs=str(folder),
            cgroup=str(self._cgroup or ""),
            init=[str(systemd)] if self._cgroup else [f"{image.PYTORCH}/bin/python", "-I", image.SMALL_INIT],
            environment={**environment, "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            volumes=list(instance.volumes),
            shared=str(shared),
        )
        self._environment = order.environment
        ours, theirs = socket.socketpair()
        with ours, theirs, (folder / boot.CONSOLE).open("ab") as console:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainlocal.fleet.boot", order.to_json(), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )
            theirs.close()
            self._first, metadata, names = self._receive(ours)
        self.metadata = MetadataServer(metadata, items_of(instance))
        self._names = NameServer(names, instance.region)

    def _receive(self, ours: socket.socket) -> tuple[int, socket.socket, socket.socket]:
        readable, _, _ = select.select([ours], [], [], 20)
        message, descriptors = (b"", []) if not readable else socket.recv_fds(ours, 64, 2)[:2]
        if not message:
            self._process.kill()
            self._process.wait()
            raise OSError("the node's namespaces could not be made; its console log says why")
        metadata, names = (socket.socket(fileno=descriptor) for descriptor in descriptors)
        return int(message), metadata, names

    @property
    def pid(self) -> int:
        """The pid of the starting process, the parent of the node's PID 1."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Whether the node is gone."""
        return self._process.poll() is not None

    def boot_result(self) -> str | None:
        """What cloud-init wrote when it was done (JSON text), or None while it is not."""
        try:
            return Path(f"/proc/{self._first}/root/{_READY}").read_text()
        except OSError:
            return None

    def end(self) -> None:
        """Ask the node to shut down."""
        # systemd(1) on SIGRTMIN+4: "Powers off the machine, starts the poweroff.target unit."
        self._signal(signal.SIGRTMIN + 4 if self._cgroup else signal.SIGTERM)

    def kill(self) -> None:
        """End the node at once: SIGKILL to its PID 1, with which the kernel kills all in its namespace."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        try:
            if not self.has_ended():
                os.kill(self._first, number)
        except ProcessLookupError:
            pass  # it has ended meanwhile

    def command(self, script: str) -> NodeCommand:
        """How a script runs in the node's namespaces."""
        enter = [f"--target={self._first}", "--mount", "--uts", "--ipc", "--net", "--pid"]
        # Forked by a shell: nsenter itself would stop with its child when systemd stops all at the shutdown, never reap it, and
        # so keep the node's PID namespace from ending.
        waiting = ["--no-fork", "--", "/bin/sh", "-c", '/bin/sh -c "$1"; exit $?', "sh"]
        arguments = ["nsenter", *enter, *waiting, script]
        return NodeCommand(arguments=arguments, environment=self._environment, folder=Path("/"))

    def close(self) -> None:
        """Clear away what is left of an ended node."""
        self.metadata.close()
        self._names.close()
        if self._cgroup:
            cgroups.remove(self._cgroup)


class IsolatedNodes:
    """Boots isolated nodes in the world that this process has entered."""

    def __init__(self, *, mount_point: Path, layer: Path, cgroup: Path | None, shared: Path, environment: dict[str, str]) -> None:
        self._mount_point, self._layer, self._cgroup, self._environment = mount_point, layer, cgroup, environment
        self._shared = shared
        self._count = 0

    def boot(self, instance: Instance, folder: Path) -> IsolatedNode:
        """Boot a node for an instance."""
        self._count += 1
        return IsolatedNode(
            instance,
            number=self._count,
            folder=folder,
            mount_point=self._mount_point,
            layer=self._layer,
            cgroup=self._cgroup,
            shared=self._shared,
            environment=self._environment,
        )
