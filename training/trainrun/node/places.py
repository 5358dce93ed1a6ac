"""Where things are on a node."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Places:
    """Files and folders of a node. All lie under one root, which is "/" except where nodes are plain processes."""

    root: Path

    @classmethod
    def from_environment(cls) -> Places:
        """The root is $TRAINCLUSTER_ROOT, or "/" when that is unset or empty."""
        return cls(root=Path(os.environ.get("TRAINCLUSTER_ROOT") or "/"))

    @property
    def spec(self) -> Path:
        """The RunSpec document, written by the bootstrap."""
        return self.root / "etc/traincluster/run.json"

    @property
    def payload(self) -> Path:
        """The unpacked payload: trainrun/ and, where the job has a source, project/."""
        return self.root / "opt/traincluster/payload"

    @property
    def project(self) -> Path:
        """The user's source."""
        return self.payload / "project"

    @property
    def state(self) -> Path:
        """What outlives the agent on this node."""
        return self.root / "var/lib/traincluster"

    @property
    def metrics(self) -> Path:
        """The metric files that rank 0 writes."""
        return self.state / "metrics"

    @property
    def stop_file(self) -> Path:
        """Its presence asks all ranks to save and leave; its text is the reason, after the seconds that they have if it
        begins with a number (`trainrun.deadline`)."""
        return self.state / "stop"

    @property
    def save_file(self) -> Path:
        """Its presence, or a newer time of it, asks all ranks for a checkpoint at their next step, after which they go on."""
        return self.state / "save"

    @property
    def program(self) -> Path:
        """Runs trainrun's commands by hand with what the agent runs with: ``trainrun check``, ``trainrun.node fault``."""
        return self.root / "opt/traincluster/bin/trainrun"

    @property
    def began(self) -> Path:
        """When the user data began, in seconds since the epoch; written by the bootstrap."""
        return self.state / "began"

    @property
    def drills(self) -> Path:
        """Notices for exercise: the file ``spot/instance-action`` in it is taken as that item of the instance metadata."""
        return self.state / "drills"

    @property
    def mpi(self) -> Path:
        """What mpirun needs while it runs."""
        return self.state / "mpi"

    @property
    def events(self) -> Path:
        """What the agent did, one JSON object a line."""
        return self.state / "events.jsonl"

    @property
    def logs(self) -> Path:
        """agent.log, supervisor.log, torchrun.log or mpirun.log, and ranks/."""
        return self.root / "var/log/traincluster"

    @property
    def torchrun_log(self) -> Path:
        """What torchrun itself says."""
        return self.logs / "torchrun.log"

    @property
    def mpirun_log(self) -> Path:
        """What mpirun itself says, or its daemon on this node."""
        return self.logs / "mpirun.log"

    @property
    def rank_logs(self) -> Path:
        """The launcher's log directory: one folder a launch, with the output of each rank."""
        return self.logs / "ranks"

    @property
    def unit(self) -> Path:
        """The systemd unit of the agent."""
        return self.root / "etc/systemd/system/trainrun.service"
