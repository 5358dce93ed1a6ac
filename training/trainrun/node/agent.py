"""The node agent, from the first step to the last."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import FrameType

from trainrun.config import ConfigError
from trainrun.node.attachments import attached_volumes
from trainrun.node.beacon import Beacon
from trainrun.node.check import check
from trainrun.node.claims import Claims
from trainrun.node.command import torchrun_command
from trainrun.node.environment import EFA_LIBRARY_FOLDERS, processors_here, rank_environment
from trainrun.node.events import Events
from trainrun.node.finish import Result, finish
from trainrun.node.group import Group
from trainrun.node.interface import interface_of
from trainrun.node.launch import Launch, TorchrunLaunch
from trainrun.node.log_stream import LogStream
from trainrun.node.meet import Meet, Meeting
from trainrun.node.metadata import Identity, Metadata, identify
from trainrun.node.metric_files import MetricFiles
from trainrun.node.mpi import mpi_launch
from trainrun.node.outcome import DO_NOT_RESTART, Leave, Outcome, StepFailed
from trainrun.node.places import Places
from trainrun.node.prepare import prepare
from trainrun.node.processes import adopt_orphans
from trainrun.node.train import Train
from trainrun.node.watch import Notices, Regroup, watching
from trainrun.spec import RunSpec
from trainrun.store import open_store

RENDEZVOUS_PORT = 29400

log = logging.getLogger(__name__)


def run(places: Places) -> int:
    """Do the node's part of the run. Returns the exit code for the service manager.

    0: the job is done, has failed for good, or this node was let go; there is nothing to restart.
    78: the node is not fit (document, check); a restart does not help.
    Anything that raises is a fault of the moment: the service manager starts the agent again.
    """
    adopt_orphans()
    signal.signal(signal.SIGTERM, _leave)
    places.logs.mkdir(parents=True, exist_ok=True)
    places.state.mkdir(parents=True, exist_ok=True)
    _log_to(places)
    try:
        spec = RunSpec.from_json(places.spec.read_text(encoding="utf-8"))
    except (OSError, ConfigError) as error:
        log.error("%s cannot be used: %s", places.spec, error)
        return DO_NOT_RESTART
    os.environ["AWS_REGION"] = os.environ["AWS_DEFAULT_REGION"] = spec.region  # for all boto3 clients
    metadata = Metadata()
    identity = identify(metadata)
    stream = _log_stream(spec, identity)
    with Events(identity=identity, path=places.events, store=open_store(spec.run_location), stream=stream) as events:
        try:
            return Agent(spec, places=places, metadata=metadata, identity=identity, events=events).run()
        except Leave as leave:
            log.info("%s", leave)
            return 0


class Agent:
    """One node's part of one run."""

    def __init__(self, spec: RunSpec, *, places: Places, metadata: Metadata, identity: Identity, events: Events) -> None:
        self.spec = spec
        self.places = places
        self.metadata = metadata
        self.identity = identity
        self.events = events
        self.python = os.environ.get("TRAINCLUSTER_PYTHON") or spec.job.python
        self.store = open_store(spec.run_location)
        self.group = Group(node=identity.node, region=spec.region)
        self.result = Result(store=self.store, since=time.time())
        self.metric_files = MetricFiles(folder=places.metrics, store=self.store, node=identity.node)

    def run(self) -> int:
        """All steps in order.

        Raises:
            Leave: this node's part has ended without a result of its own.
        """
        try:
            with self.events.step("prepare") as report:
                report.detail = prepare(
                    spec=self.spec,
                    places=self.places,
                    node=self.identity.node,
                    address=self.identity.address,
                    attached=lambda: attached_volumes(node=self.identity.node, region=self.spec.region),
                )
            with self.events.step("check") as report:
                report.detail = check(spec=self.spec, python=self.python, store=self.store, events=self.events)
        except StepFailed:
            return DO_NOT_RESTART
        outcome = self.train()
        with self.events.step("finish") as report:
            report.detail = finish(
                outcome,
                node=self.identity.node,
                shutdown=self.spec.shutdown,
                result=self.result,
                metric_files=self.metric_files,
                group=self.group,
            )
        return 0

    def train(self) -> Outcome:
        """Meet and train until the job has ended.

        Raises:
            Leave: this node's part has ended without a result of its own.
        """
        with Beacon(address=self.identity.address) as beacon:
            meet = Meet(
                identity=self.identity,
                port=int(os.environ.get("TRAINRUN_RENDEZVOUS_PORT") or RENDEZVOUS_PORT),
                beacon=beacon.port,
                group=self.group,
                claims=Claims(store=self.store),
                nodes_min=self.spec.cluster.nodes_min,
                peer_lost=self.spec.timeouts.peer_lost,
                ended=self.result.ended,
            )
            train = Train(
                spec=self.spec,
                places=self.places,
                events=self.events,
                meet=meet,
                launch=lambda meeting, first: self.launch(meeting, first, beacon=beacon.port),
                watch=self.watch,
            )
            try:
                return train.run()
            except StepFailed as failure:
                return Outcome(state="failed", reason=str(failure))

    def launch(self, meeting: Meeting, first: bool, *, beacon: int) -> Launch:
        """Start the launcher.

        Raises:
            StepFailed: there is no Open MPI any more.
        """
        if self.spec.job.launcher == "mpirun":
            return mpi_launch(
                self.spec,
                python=self.python,
                places=self.places,
                identity=self.identity,
                meeting=meeting,
                first=first,
                beacon=beacon,
                store=self.store,
                environment=self.rank_environment,
            )
        command = torchrun_command(
            self.spec, python=self.python, places=self.places, identity=self.identity, meeting=meeting, first=first
        )
        log.info("Launching: %s", " ".join(command))
        return TorchrunLaunch(command, environment=self.rank_environment(os.environ), places=self.places)

    def rank_environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of the ranks over ``base``."""
        return rank_environment(
            self.spec,
            places=self.places,
            base=base,
            interface=interface_of(self.identity.address),
            processors=processors_here(),
            libraries=[folder for folder in EFA_LIBRARY_FOLDERS if folder.is_dir()],
        )

    def watch(self, regroup: Regroup, meeting: Meeting) -> AbstractContextManager[None]:
        """Watch what is to be watched beside torchrun."""
        return watching(
            notices=Notices(
                metadata=self.metadata,
                stop_file=self.places.stop_file,
                stop_grace=self.spec.timeouts.stop_grace,
                events=self.events,
            ),
            metric_files=self.metric_files,
            regroup=regroup,
            publish_seconds=self.spec.monitoring.publish_seconds,
            nodes=meeting.expected,
        )


def _log_stream(spec: RunSpec, identity: Identity) -> LogStream | None:
    group = spec.monitoring.log_group
    return LogStream(group=group, name=f"{identity.node}/events", region=spec.region) if group else None


def _leave(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough: the ranks are saving
    raise Leave(f"The agent was asked to stop ({signal.Signals(number).name}).")


def _log_to(places: Places) -> None:
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(threadName)s %(message)s")
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in (logging.FileHandler(places.logs / "agent.log"), logging.StreamHandler()):
        handler.setFormatter(formatter)
        root.addHandler(handler)
