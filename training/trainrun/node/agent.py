"""The node agent, from the first step to the last."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import AbstractContextManager, suppress
from types import FrameType

from botocore.exceptions import BotoCoreError, ClientError

from trainrun.config import ConfigError
from trainrun.node.attachments import attached_volumes
from trainrun.node.beacon import Beacon
from trainrun.node.capacity_end import CapacityBlockEnd, capacity_block_end
from trainrun.node.check import check, check_machine_again, told
from trainrun.node.checks.runner import Checked, ChecksFailed
from trainrun.node.claims import Claims
from trainrun.node.comparison import Comparison
from trainrun.node.departure import Departure, leave_if_asked
from trainrun.node.dumps import dump_ranks
from trainrun.node.events import Events
from trainrun.node.finish import asked_to_end, finish, kept_text
from trainrun.node.group import Group
from trainrun.node.keep import carry_out
from trainrun.node.launching import Launching
from trainrun.node.log_stream import LogStream
from trainrun.node.meet import Meet, Meeting
from trainrun.node.metadata import Identity, Metadata, identify
from trainrun.node.metric_files import MetricFiles
from trainrun.node.notices import RebalanceRecommendation, ScheduledEvents, SpotInterruption, Termination
from trainrun.node.numa import Binding, bind
from trainrun.node.outcome import AGAIN, DO_NOT_RESTART, Leave, Outcome, Signalled, StepFailed, Unfit
from trainrun.node.patience import patiently
from trainrun.node.periodic import Periodic
from trainrun.node.places import Places
from trainrun.node.prepare import prepare
from trainrun.node.processes import adopt_orphans
from trainrun.node.ready import Readiness
from trainrun.node.replacements import Replacements, replace_or_end, tell_console
from trainrun.node.result import End, Result, digest
from trainrun.node.software import Software
from trainrun.node.software_step import prepare_software
from trainrun.node.stalls import Stalls
from trainrun.node.train import Train
from trainrun.node.watch import DRILL_SECONDS, Regroup, Watch, Watched, watching
from trainrun.spec import RunSpec
from trainrun.store import StoreError, open_store

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
        _tell_of_bootstrap(places, events)
        agent = Agent(spec, places=places, metadata=metadata, identity=identity, events=events)
        try:
            code = agent.run()
        except Signalled as leave:
            log.info("%s", leave)
            return 0
        except Leave as leave:
            log.info("%s", leave)
            code = 0
    with suppress(Signalled):
        agent.departure.linger(metadata.get)
    return code


class Agent:
    """One node's part of one run."""

    def __init__(self, spec: RunSpec, *, places: Places, metadata: Metadata, identity: Identity, events: Events) -> None:
        self.spec = spec
        self.places = places
        self.metadata = metadata
        self.identity = identity
        self.events = events
        self.software = Software(os.environ.get("TRAINCLUSTER_PYTHON") or spec.job.python)
        self.store = open_store(spec.run_location)
        self.group = Group(node=identity.node, region=spec.region)
        self.result = Result(store=self.store, node=identity.node, document=digest(spec), members=self.group.members)
        self.readiness = Readiness(spec.readiness, node=identity.node, region=spec.region)
        self.binding = Binding()
        self.metric_files = MetricFiles(folder=places.metrics, store=self.store, node=identity.node)
        self.departure = Departure(
            stop_file=places.stop_file,
            stop_grace=spec.timeouts.stop_grace,
            group=self.group,
            hook=spec.cluster.termination_hook,
        )

    def run(self) -> int:
        """All steps in order, with an ear for notices from the first to the last.

        Raises:
            Leave: this node's part has ended without a result of its own.
        """
        with Periodic("Asking for notices", DRILL_SECONDS, self.notices().look_when_due):
            if end := self.ended():  # before this agent: of kept nodes one was started anew, or came in place of another
                return self.linger(end)
            try:
                return self.steps()
            except Signalled:
                raise
            except Leave:
                if reason := self.departure.ends_run or asked_to_end(self.places.stop_file):
                    return self.finish(Outcome(state="stopped", reason=f"It saved and stopped: {reason}."))
                self.departure.carry_out()
                if end := self.ended():
                    return self.linger(end)
                raise

    def steps(self) -> int:
        """What `run` does if there is no notice.

        Raises:
            Leave: as `run`.
        """
        try:
            with self.events.step("prepare") as report:
                report.detail = patiently(self.prepare)
            leave_if_asked(self.places.stop_file)
            with self.events.step("software") as report:
                self.software, report.detail = patiently(self.prepare_software)
            leave_if_asked(self.places.stop_file)
            with self.events.step("check") as report:
                found, self.binding = patiently(self.check)
                self.software.clear()
                report.detail = f"{told(found)}; {self.binding}"
        except StepFailed as failure:
            return self.unfit(failure)
        self.tell_ready()
        leave_if_asked(self.places.stop_file)
        try:
            outcome = self.train()
        except Unfit as failure:
            return self.unfit(failure)
        return self.finish(outcome)

    def prepare(self) -> str:
        """Make the node ready; may run again. Returns what was done.

        Raises:
            StepFailed: it cannot be.
        """
        leave_if_asked(self.places.stop_file)
        return prepare(
            spec=self.spec,
            places=self.places,
            node=self.identity.node,
            address=self.identity.address,
            attached=lambda: attached_volumes(node=self.identity.node, region=self.spec.region),
        )

    def prepare_software(self) -> tuple[Software, str]:
        """Have what the job runs with; may run again. Returns it, and what was done.

        Raises:
            StepFailed: it cannot be had.
        """
        leave_if_asked(self.places.stop_file)
        return prepare_software(
            self.spec,
            image=self.software,
            places=self.places,
            node=self.identity.node,
            store=open_store(self.spec.storage.location).child("software"),
        )

    def check(self) -> tuple[list[Checked], Binding]:
        """Look at the node; may run again. Returns what was found, and how ranks are bound.

        Raises:
            StepFailed: it is not what the job was promised.
        """
        leave_if_asked(self.places.stop_file)
        found = check(
            spec=self.spec,
            software=self.software,
            places=self.places,
            node=self.identity.node,
            store=self.store,
            key=self.events.key,
            send=self.events.send,
        )
        return found, bind(self.spec.job, self.spec.cluster, software=self.software)

    def unfit(self, failure: StepFailed) -> int:
        """Have this node replaced, or end the run when too many were. Returns the agent's exit code.

        Where all is well but for the store, which does not answer, the agent is started anew until it does: another node would
        not reach it either, and nodes that miss it together must not end the run.
        """
        reason = str(failure)
        if self.readiness.is_awaited:
            self.events.report("ready", "failed", detail=self.readiness.failed(self.events.failed_step, reason))
        if isinstance(failure, ChecksFailed) and failure.names == ["store"]:
            tell_console(f"{self.identity.node} waits for the run's folder. {reason}", places=self.places)
            return AGAIN
        outcome = replace_or_end(
            reason,
            node=self.identity.node,
            replacements=Replacements(store=self.store, allowed=self.spec.shutdown.max_replacements),
            group=self.group,
            places=self.places,
        )
        return outcome if isinstance(outcome, int) else self.finish(outcome)

    def finish(self, outcome: Outcome) -> int:
        """Put the result down and have the group go, or stay. Returns the agent's exit code."""
        with self.events.step("finish") as report:
            end, report.detail = finish(
                outcome,
                spec=self.spec,
                store=self.store,
                result=self.result,
                metric_files=self.metric_files,
                group=self.group,
            )
        return self.keep(end)

    def ended(self) -> End | None:
        """The end of the run, if it has come; None, too, where nobody can be asked."""
        try:
            return self.result.end()
        except (StoreError, BotoCoreError, ClientError) as error:
            log.warning("Whether the run has ended cannot be asked: %s", error)
            return None

    def linger(self, end: End) -> int:
        """Do this node's part of an end that another has put down. Returns the agent's exit code."""
        self.events.report("finish", "done", detail=f"{end} {kept_text(end)}")
        return self.keep(end)

    def keep(self, end: End) -> int:
        """Stay for as long as the nodes are kept. Returns the agent's exit code."""
        return 0 if carry_out(end, store=self.store, group=self.group) else AGAIN

    def tell_ready(self) -> None:
        """Tell CloudFormation, if it waits for it, beside the work: it may not answer."""
        if self.readiness.is_awaited:
            threading.Thread(target=self._tell_ready, name="ready", daemon=True).start()

    def _tell_ready(self) -> None:
        self.events.report("ready", "done", detail=self.readiness.passed())

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
                cluster=self.spec.cluster,
                peer_lost=self.spec.timeouts.peer_lost,
                rendezvous=self.spec.timeouts.rendezvous,
                ended=self.result.ended,
                broken=self.result.broken,
                leave_if_asked=lambda: leave_if_asked(self.places.stop_file),
                report=lambda text: self.events.report("recover", "done", detail=text),
            )
            launching = Launching(
                spec=self.spec,
                places=self.places,
                identity=self.identity,
                store=self.store,
                software=self.software,
                binding=self.binding,
                beacon=beacon.port,
            )
            train = Train(
                spec=self.spec,
                places=self.places,
                events=self.events,
                meet=meet,
                launch=launching.launch,
                watch=self.watch,
                watched=lambda meeting: self.watched(meeting, meet),
                check_again=lambda: check_machine_again(self.spec.cluster),
                training=self.departure.training,
            )
            try:
                return train.run()
            except Unfit:
                raise
            except StepFailed as failure:
                return Outcome(state="failed", reason=str(failure))

    def notices(self) -> Watch:
        """What is watched from the first step on."""
        grace = self.spec.timeouts.stop_grace
        return Watch(
            kinds=[
                SpotInterruption(),
                Termination(),
                RebalanceRecommendation(),
                ScheduledEvents(stop_grace=grace),
                CapacityBlockEnd(
                    self.spec.cluster,
                    stop_grace=grace,
                    find=capacity_block_end(node=self.identity.node, region=self.spec.region),
                ),
            ],
            ask=Metadata(attempts=1).get,
            drills=self.places.drills,
            departure=self.departure,
            save_file=self.places.save_file,
            events=self.events,
        )

    def watched(self, meeting: Meeting, meet: Meet) -> Watched:
        """What looks at the launch that follows a meeting."""
        state, node = self.places.state, self.identity.node
        return Watched(
            regroup=Regroup(meet=meet, meeting=meeting),
            stalls=Stalls(
                state=state,
                store=self.store,
                node=node,
                no_progress=self.spec.timeouts.no_progress,
                dump=lambda folder: dump_ranks(folder, besides=self.software.processes()),
            ),
            comparison=Comparison(state=state, store=self.store, node=node, meeting=meeting, events=self.events),
        )

    def watch(self, watched: Watched, meeting: Meeting) -> AbstractContextManager[None]:
        """Watch what is to be watched beside torchrun."""
        return watching(
            watched,
            metric_files=self.metric_files,
            publish_seconds=self.spec.monitoring.publish_seconds,
            nodes=meeting.expected,
        )


def _tell_of_bootstrap(places: Places, events: Events) -> None:
    """Report once how long it took from the first instruction of the user data until this agent."""
    with suppress(OSError, ValueError):
        began = float(places.began.read_text(encoding="utf-8"))
        events.report("bootstrap", "done", seconds=time.time() - began, detail="from the first instruction of the user data")
        places.began.unlink()


def _log_stream(spec: RunSpec, identity: Identity) -> LogStream | None:
    group = spec.monitoring.log_group
    return LogStream(group=group, name=f"{identity.node}/events", region=spec.region) if group else None


def _leave(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough: the ranks are saving
    raise Signalled(f"The agent was asked to stop ({signal.Signals(number).name}).")


def _log_to(places: Places) -> None:
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(threadName)s %(message)s")
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in (logging.FileHandler(places.logs / "agent.log"), logging.StreamHandler()):
        handler.setFormatter(formatter)
        root.addHandler(handler)
