"""Run the job on this node until it is done: meet, launch, and after each loss the same again."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from trainrun import last_error, progress
from trainrun.node.departure import leave_if_asked
from trainrun.node.events import Events
from trainrun.node.failures import Failure, Repetition, failure_of
from trainrun.node.launch import Launch
from trainrun.node.meet import Meet, Meeting
from trainrun.node.outcome import ASKED_TO_STOP, Leave, Outcome, StepFailed
from trainrun.node.places import Places
from trainrun.node.watch import Watched
from trainrun.spec import RunSpec

POLL_SECONDS = 0.1
REGROUP_GRACE_SECONDS = 10.0
"""For the ranks to save when the rendezvous host is gone. They mostly cannot, since their peers are gone too."""
LAUNCHER_SECONDS = 5.0
"""For the launcher itself to end after its ranks."""
SETTLED_SECONDS = 600.0
"""A launch that ran so long, and came further, was no part of a series of failures: the budget and the pauses start anew."""
LONGEST_PAUSE_SECONDS = 30.0
ABORTED_AT_EXIT = "terminate called without an active exception"
"""What the C++ library says when a thread is torn down that nobody waited for."""

log = logging.getLogger(__name__)


class Budget:
    """Restarts left, and the pause before each: none after a launch that came further than those before it, else doubling."""

    def __init__(self, *, restarts: int) -> None:
        self._allowed = restarts
        self._used = 0
        self._standing = 0
        self._furthest = 0

    def note(self, *, ran: float, step: int = 0) -> None:
        """Count a launch that ended after ``ran`` seconds without having finished the job.

        Args:
            ran: how long it ran.
            step: how far it came, 0 when it is not known; one that came further than any before it is followed without a pause.
        """
        further = step > self._furthest or not step
        settled = ran >= SETTLED_SECONDS and further  # a launch that hangs takes long, and comes nowhere
        self._used = 1 if settled else self._used + 1
        self._standing = 1 if settled or step > self._furthest else self._standing + 1
        self._furthest = max(self._furthest, step)

    @property
    def spent(self) -> bool:
        """Whether no restart is left."""
        return self._used > self._allowed

    @property
    def pause(self) -> float:
        """Seconds to wait before the next launch."""
        return 0.0 if self._standing < 2 else min(LONGEST_PAUSE_SECONDS, 2.0 ** (self._standing - 2))

    def __str__(self) -> str:
        minutes = SETTLED_SECONDS / 60
        return f"{self._allowed} restarts (shutdown.max_restarts) with less than {minutes:g} minutes of training between them"


class LaunchFailed(StepFailed):
    """A launch failed of itself.

    Attributes:
        failure: what to hold against the job, if anything.
    """

    def __init__(self, text: str, failure: Failure | None) -> None:
        super().__init__(text)
        self.failure = failure


class Train:
    """The job on one node."""

    def __init__(
        self,
        *,
        spec: RunSpec,
        places: Places,
        events: Events,
        meet: Meet,
        launch: Callable[[Meeting, bool], Launch],
        watch: Callable[[Watched, Meeting], AbstractContextManager[None]],
        watched: Callable[[Meeting], Watched],
        check_again: Callable[[], None] = lambda: None,
        training: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Args:
        spec: the document.
        places: where things are on this node.
        events: where steps are reported.
        meet: how the node meets its peers.
        launch: starts the launcher for a meeting; the flag tells whether it is the first launch.
        watch: what is watched beside it.
        watched: makes what looks at one launch.
        check_again: looks at the machine after a launch failed of itself; raises `Unfit`.
        training: is around the time in which there are ranks.
        """
        self._spec = spec
        self._places = places
        self._events = events
        self._meet = meet
        self._launch = launch
        self._watch = watch
        self._watched, self._check_again = watched, check_again
        self._training = training

    def run(self) -> Outcome:
        """Train until the job is done, this node is asked to leave, the budget is spent, or a failure repeats itself.

        Raises:
            Leave: the run has ended without this node, or the group lets it go.
            StepFailed: the nodes did not meet.
            Unfit: this node cannot train any more.
        """
        budget = Budget(restarts=self._spec.shutdown.max_restarts)
        repetition = Repetition(allowed=self._spec.shutdown.same_failures)
        first = True
        while True:
            self._leave_if_asked()
            with self._events.step("meet") as report:
                meeting = self._meet.wait(timeout=self._spec.timeouts.meet)
                report.detail = f"{meeting.claim.node} hosts the rendezvous; {meeting.in_service} nodes in service"
            started = time.monotonic()
            try:
                with self._events.step("train") as report:
                    report.detail = self._train(meeting, first)
                return Outcome(state="succeeded", reason="The job ended with exit code 0.")
            except StepFailed as failure:
                reason, repeated = str(failure), ""
                if isinstance(failure, LaunchFailed):
                    self._check_again()
                    repeated = repetition.note(failure.failure)
            self._leave_if_asked()
            if repeated:
                return Outcome(state="failed", reason=repeated)
            first = False
            budget.note(ran=time.monotonic() - started, step=self._furthest_step())
            if budget.spent:
                return Outcome(state="failed", reason=f"The job failed after {budget}. The last failure: {reason}")
            time.sleep(budget.pause)

    def _train(self, meeting: Meeting, first: bool) -> str:
        """One launch, until the job is done.

        Raises:
            Leave: this node was asked to stop.
            StepFailed: the launch ended otherwise; the text explains it.
        """
        with self._training():
            self._leave_if_asked()  # between a look before this and the launch there could be a notice
            return self._train_once(meeting, first)

    def _train_once(self, meeting: Meeting, first: bool) -> str:
        watched = self._watched(meeting)
        for traces in (progress, last_error):
            traces.clear(self._places.state)
        kills, started = _kills_for_memory(), time.monotonic()
        with self._launch(meeting, first) as launch, self._watch(watched, meeting):
            try:
                self._supervise(launch, watched)
            except Leave:
                self._meet.resign()
                launch.stop(grace=self._spec.timeouts.stop_grace + LAUNCHER_SECONDS)
                raise
            self._leave_if_asked()
            if launch.exit_code() == 0:
                return "the job is done"
            if reason := watched.stalls.reason or watched.regroup.reason or launch.reason:
                raise StepFailed(f"{reason} The nodes meet anew.")
            codes = launch.rank_exit_codes()
            if self._was_done(launch):
                return "the job is done; a rank that had done all of it was aborted by torch when it ended"
            if launch.exit_code() == ASKED_TO_STOP or (codes and set(codes) == {ASKED_TO_STOP}):
                raise StepFailed(f"The ranks saved and left (exit code {ASKED_TO_STOP}) because a peer was asked to stop.")
            _beside(watched.comparison.name_late)
            text = f"{launch.name} ended with exit code {launch.exit_code()}, ranks with {codes}:\n{launch.explanation()}"
            step = self._furthest_step()
            if not step and time.monotonic() - started > SETTLED_SECONDS:
                raise LaunchFailed(text, None)  # ranks that tell no steps have come somewhere in such a time
            failure = failure_of(
                step=step,
                errors=last_error.read(self._places.state),
                codes=codes,
                explanation=launch.explanation(),
                killed_by_kernel=_kills_for_memory() > kills,
            )
            raise LaunchFailed(text, failure)

    def _furthest_step(self) -> int:
        """The step that the ranks of this node are at, or were at their end; 0 when they tell none."""
        told = [one.step + 1 for one in progress.read(self._places.state) if one.step or one.arrived]
        return max(told, default=0)

    def _was_done(self, launch: Launch) -> bool:
        """Whether the ranks here had come to the end, saved, and were aborted only as their processes ended.

        Seen with torch 2.13 about once in twenty ends of two ranks: a thread of its own outlives what it works for.
        """
        ranks = progress.read(self._places.state)
        ended = bool(ranks) and all(one.phase == "ended" for one in ranks)
        return ended and set(launch.rank_exit_codes()) == {-signal.SIGABRT} and ABORTED_AT_EXIT in launch.explanation()

    def _supervise(self, launch: Launch, watched: Watched) -> None:
        """Wait for the launcher to end, and end it where it must not go on."""
        stopping_since = 0.0
        while launch.exit_code() is None:
            if watched.stalls.reason:
                launch.stop(grace=0.0)  # what hangs does not save
            elif watched.regroup.reason:
                launch.stop(grace=REGROUP_GRACE_SECONDS)
            elif self._places.stop_file.exists():
                if not stopping_since:
                    stopping_since = time.monotonic()
                    self._meet.resign()
                    if self._spec.job.stop_signal:
                        launch.signal_ranks(signal.Signals[self._spec.job.stop_signal])
                if time.monotonic() - stopping_since > self._spec.timeouts.stop_grace:
                    launch.stop(grace=REGROUP_GRACE_SECONDS)
            time.sleep(POLL_SECONDS)

    def _leave_if_asked(self) -> None:
        leave_if_asked(self._places.stop_file)


def _beside(act: Callable[[], None]) -> None:
    """Do something that the next launch need not wait for."""

    def run() -> None:
        try:
            act()
        except Exception:
            log.exception("What had happened could not be told.")

    threading.Thread(target=run, name="telling", daemon=True).start()


def _kills_for_memory() -> int:
    """How many processes the kernel has killed because memory ran out, since it booted; 0 where it does not tell."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
