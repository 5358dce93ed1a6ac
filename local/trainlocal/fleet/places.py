"""Where the files of one local cloud lie, below the folder that its starter named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Places:
    """The files below `directory`.

    `logs` and `nodes` (one folder of logs an instance) stay for reading; all else goes when the cloud ends.
    """

    directory: Path

    @property
    def state(self) -> Path:
        """Who serves here, and how: read by `python -m trainlocal status`."""
        return self.directory / "local.json"

    @property
    def logs(self) -> Path:
        """Logs of the janitor, the cloud and the fleet."""
        return self.directory / "logs"

    @property
    def nodes(self) -> Path:
        """A folder for each instance with its console and its /var/log."""
        return self.directory / "nodes"

    @property
    def run(self) -> Path:
        """All that lives only while the cloud does."""
        return self.directory / "run"

    @property
    def cloud_socket(self) -> Path:
        """Takes listening sockets for the emulated cloud."""
        return self.run / "cloud.sock"

    @property
    def fleet_socket(self) -> Path:
        """Takes requests for the fleet."""
        return self.run / "fleet.sock"

    @property
    def janitor_socket(self) -> Path:
        """Takes the request to end."""
        return self.run / "janitor.sock"

    @property
    def mount_point(self) -> Path:
        """An empty folder; each node mounts its root there, in a mount namespace of its own."""
        return self.run / "root"

    @property
    def shared(self) -> Path:
        """What stands in for shared file systems; all isolated nodes see it."""
        return self.run / "shared"

    @property
    def plain_roots(self) -> Path:
        """The folders that stand for the roots of plain nodes."""
        return self.run / "plain"

    @property
    def commands(self) -> Path:
        """Names, by the mark in their environment, the commands that `Local.popen` started. There is no such file."""
        return self.run / "commands"

    @property
    def cdk_home(self) -> Path:
        """The cdk CLI's home (CDK_HOME), where it caches accounts."""
        return self.run / "cdk"
