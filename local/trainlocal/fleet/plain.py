"""The plain tier: a node is a folder and the processes of its user data, on this machine's own loopback. No boot.

There is no namespace to hold a node's processes together. What holds them is their environment: all of them carry
the node's TRAINCLUSTER_ROOT, however often they fork or change their session, and it is by this that they are found.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from trainlocal.fleet.fleet import NodeCommand
from trainlocal.fleet.imds import MetadataServer, items_of
from trainlocal.fleet.instances import Instance

MARK = "TRAINCLUSTER_ROOT"
_SCRIPT, _OUTPUT = "user-data", "cloud-init-output.log"


def _environments() -> dict[int, bytes]:
    """The environments of this user's processes, by pid."""
    proc = Path("/proc")
    if (proc / "self/environ").exists():
        found = {}
        for folder in proc.iterdir():
            if folder.name.isdigit():
                try:
                    found[int(folder.name)] = (folder / "environ").read_bytes()
                except OSError:
                    continue  # another user's, or gone meanwhile
        return found
    listing = subprocess.run(["ps", "-axEww", "-o", "pid=,command="], capture_output=True, check=True).stdout
    lines = (line.split(None, 1) for line in listing.splitlines())
    return {int(fields[0]): fields[1].replace(b" ", b"\0") for fields in lines if len(fields) == 2}


def processes_of(root: Path) -> list[int]:
    """The pids of the processes that carry the mark of the node at `root`, or of any node below it."""
    mark = f"{MARK}={root}".encode()
    found = []
    for pid, environment in _environments().items():
        carried = next((entry for entry in environment.split(b"\0") if entry.startswith(mark)), None)
        if carried is not None and carried[len(mark) :][:1] in (b"", b"/"):
            found.append(pid)
    return [pid for pid in found if pid != os.getpid()]


def signal_all(root: Path, number: int) -> None:
    """Send a signal to all processes of the node at `root`, or of the nodes below it."""
    for pid in processes_of(root):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def kill_all(root: Path, seconds: float = 5.0) -> None:
    """SIGKILL until none is left (a process may fork while it is being looked for), for at most `seconds`."""
    deadline = time.monotonic() + seconds
    while processes_of(root):
        signal_all(root, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes of the node at {root} do not end: {processes_of(root)}")
        time.sleep(0.02)


class PlainNode:
    """A node without a boot: its user data, run by bash in a folder that stands for its root."""

    def __init__(self, instance: Instance, *, folder: Path, root: Path, environment: dict[str, str]) -> None:
        """Start the user data. `folder` gets its output; `root` is the node's folder."""
        if not instance.user_data.startswith(b"#!"):
            raise OSError("its user data is not a script; the plain tier has no cloud-init and runs scripts alone")
        self.metadata = MetadataServer(socket.create_server(("127.0.0.1", 0)), items_of(instance))
        self._root, self._ends = root, False
        folder.mkdir(parents=True, exist_ok=True)
        root.mkdir(parents=True)
        script = root / _SCRIPT
        script.write_bytes(instance.user_data)
        script.chmod(0o700)
        own = {
            MARK: str(root),
            "TRAINCLUSTER_PYTHON": sys.executable,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{self.metadata.port}",
            "HOME": str(root),
            "PATH": os.environ.get("PATH", os.defpath),
        }
        self._environment = {**environment, **own}
        with (folder / _OUTPUT).open("ab") as output:
            self._process = subprocess.Popen(
                ["bash", str(script)],
                cwd=root,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """One of its processes: the user data's shell, and after its end the oldest that it left behind."""
        return self._process.pid if self._process.poll() is None else min(processes_of(self._root), default=self._process.pid)

    def has_ended(self) -> bool:
        """Whether it was ended and all its processes are gone. A machine does not end because its processes have."""
        return self._ends and self._process.poll() is not None and not processes_of(self._root)

    def boot_result(self) -> str | None:
        """The outcome of the user data in cloud-init's words, or None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        errors = [] if status == 0 else [f"the user data ended with status {status}; see {_OUTPUT}"]
        return json.dumps({"v1": {"datasource": "none (plain tier)", "errors": errors}})

    def end(self) -> None:
        """Ask its processes to end."""
        self._ends = True
        signal_all(self._root, signal.SIGTERM)

    def kill(self) -> None:
        """Kill its processes."""
        self._ends = True
        kill_all(self._root)
        self._process.wait()

    def command(self, script: str) -> NodeCommand:
        """How a script runs among the node's processes."""
        return NodeCommand(arguments=["/bin/sh", "-c", script], environment=self._environment, folder=self._root)

    def close(self) -> None:
        """Clear away what is left of an ended node."""
        self.metadata.close()


class PlainNodes:
    """Boots plain nodes; `roots` is the folder for their folders."""

    def __init__(self, *, roots: Path, environment: dict[str, str]) -> None:
        self._roots, self._environment = roots, environment

    def boot(self, instance: Instance, folder: Path) -> PlainNode:
        """Start a node for an instance."""
        return PlainNode(instance, folder=folder, root=self._roots / instance.id, environment=self._environment)
