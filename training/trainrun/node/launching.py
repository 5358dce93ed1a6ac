"""How this node starts its part of the job: which launcher, by which command, in which environment."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from trainrun.node.checks.versions import efa_installer
from trainrun.node.command import torchrun_command
from trainrun.node.environment import EFA_LIBRARY_FOLDERS, processors_here, rank_environment
from trainrun.node.interface import interface_of
from trainrun.node.launch import Launch, TorchrunLaunch
from trainrun.node.meet import Meeting
from trainrun.node.metadata import Identity
from trainrun.node.mpi import mpi_launch
from trainrun.node.numa import Binding
from trainrun.node.places import Places
from trainrun.node.software import Software
from trainrun.spec import RunSpec
from trainrun.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Launching:
    """What is known when a launch begins."""

    spec: RunSpec
    places: Places
    identity: Identity
    store: Store
    """The run's folder."""
    software: Software
    """What the ranks run with."""
    binding: Binding
    """How they are bound to processors."""
    beacon: int
    """Port on which this agent shows that it is alive."""

    def launch(self, meeting: Meeting, first: bool) -> Launch:
        """Start the launcher for a meeting.

        Args:
            meeting: what the nodes agreed on.
            first: whether it is the first launch since the agent started.

        Raises:
            StepFailed: there is no Open MPI any more.
        """
        if self.spec.job.launcher == "mpirun":
            return mpi_launch(
                self.spec,
                python=self.software.python,
                places=self.places,
                identity=self.identity,
                meeting=meeting,
                first=first,
                beacon=self.beacon,
                store=self.store,
                environment=self.environment,
                processors=self.binding.processors,
            )
        command = torchrun_command(
            self.spec,
            python=self.software.python,
            places=self.places,
            identity=self.identity,
            meeting=meeting,
            first=first,
            numa=self.binding.way,
        )
        log.info("Launching: %s", " ".join(command))
        environment = self.environment(os.environ)
        return TorchrunLaunch(command, environment=environment, places=self.places, software=self.software)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of the ranks over ``base``."""
        return rank_environment(
            self.spec,
            places=self.places,
            base=self.software.environment(base),
            interface=interface_of(self.identity.address),
            processors=processors_here(),
            libraries=[folder for folder in EFA_LIBRARY_FOLDERS if folder.is_dir()] if self.software.sees_node else [],
            installer=efa_installer() if self.spec.cluster.efa_interfaces else "",
        )
