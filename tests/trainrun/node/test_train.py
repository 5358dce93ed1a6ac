"""The loop of meeting and launching, with launches that end as they are told to."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

from trainrun import last_error
from trainrun.directory import DirectoryStore
from trainrun.node.claims import Claim
from trainrun.node.events import Events
from trainrun.node.launch import TorchrunLaunch
from trainrun.node.meet import Meeting
from trainrun.node.metadata import Identity
from trainrun.node.outcome import Leave, Unfit
from trainrun.node.places import Places
from trainrun.node.train import ABORTED_AT_EXIT, Budget, Train
from trainrun.node.watch import Regroup, Watched
from trainrun.progress import ProgressFile
from trainrun.spec import ClusterSpec, JobSpec, RunSpec, ShutdownSpec, StorageSpec, TimeoutSpec

MEETING = Meeting(claim=Claim(generation=1, node="i-1", address="10.0.0.7", port=29400, beacon=40000), in_service=2, expected=2)


class FakeLaunch:
    """Runs for some looks, then has ended with a code; a stop ends it."""

    name = "torchrun"
    reason = ""

    def __init__(self, code, *, ranks=(), looks=0, while_running=lambda: None, said="RuntimeError: boom"):
        self._code, self._ranks, self._looks, self._while_running = code, list(ranks), looks, while_running
        self._said = said
        self.stopped_with = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def exit_code(self):
        if self._looks > 0:
            self._looks -= 1
            self._while_running()
            return None
        return self._code

    def stop(self, *, grace):
        self.stopped_with, self._looks = grace, 0

    def rank_exit_codes(self):
        return self._ranks

    def explanation(self):
        return self._said


class NeverHangs:
    reason = ""


class ComparesNothing:
    def name_late(self):
        pass


class FakeMeet:
    resigned = 0

    def wait(self, *, timeout):
        return MEETING

    def resign(self):
        self.resigned += 1


@pytest.fixture
def places(tmp_path):
    places = Places(root=tmp_path)
    places.state.mkdir(parents=True)
    return places


@pytest.fixture
def events(places, tmp_path):
    identity = Identity(node="i-1", address="10.0.0.7")
    return Events(identity=identity, path=places.events, store=DirectoryStore(tmp_path / "run"))


@pytest.fixture
def train_with(places, events, monkeypatch):
    monkeypatch.setattr("trainrun.node.train.POLL_SECONDS", 0.0)
    slept = []
    monkeypatch.setattr("trainrun.node.train.time.sleep", slept.append)

    def make(*launches, max_restarts=5, stop_grace=90, watch=lambda watched, meeting: nullcontext(), stalls=NeverHangs):
        spec = RunSpec(
            run="r",
            region="us-east-1",
            cluster=ClusterSpec(name="c", instance_type="c7i.large", nodes_min=1, nodes_desired=2, nodes_max=2),
            job=JobSpec(entry_point="train.py"),
            storage=StorageSpec(location="/run"),
            timeouts=TimeoutSpec(stop_grace=stop_grace),
            shutdown=ShutdownSpec(max_restarts=max_restarts),
        )
        remaining = list(launches)
        make.firsts, make.meet = [], FakeMeet()

        def launch(meeting, first):
            make.firsts.append(first)
            return remaining.pop(0)

        def watched(meeting):
            return Watched(regroup=Regroup(meet=make.meet, meeting=meeting), stalls=stalls(), comparison=ComparesNothing())

        return Train(spec=spec, places=places, events=events, meet=make.meet, launch=launch, watch=watch, watched=watched)

    make.slept = slept
    return make


def states(events):

    lines = [json.loads(line) for line in events._path.read_text().splitlines()]
    return [(line["state"], line["detail"]) for line in lines if line["step"] == "train"]


def test_a_job_that_ends_well_has_succeeded(train_with, events):
    assert train_with(FakeLaunch(0, looks=3)).run().state == "succeeded"
    assert states(events) == [("started", ""), ("done", "the job is done")]


def test_a_failure_is_explained_and_launched_again(train_with, events):
    assert train_with(FakeLaunch(1, ranks=[1]), FakeLaunch(0)).run().state == "succeeded"
    assert states(events)[1] == ("failed", "torchrun ended with exit code 1, ranks with [1]:\nRuntimeError: boom")
    assert train_with.firsts == [True, False]


def test_ranks_that_a_peer_asked_to_stop_are_launched_again(train_with, events):
    assert train_with(FakeLaunch(1, ranks=[75, 75]), FakeLaunch(0)).run().state == "succeeded"
    assert "because a peer was asked to stop" in states(events)[1][1]


def test_a_spent_budget_ends_the_run_with_the_last_failure(train_with):
    outcome = train_with(
        *[FakeLaunch(1, ranks=[1], said=f"RuntimeError: {word} boom") for word in ("a", "b", "c")], max_restarts=2
    ).run()
    assert outcome.state == "failed"
    assert outcome.reason.startswith("The job failed after 2 restarts (shutdown.max_restarts)")
    assert outcome.reason.endswith("RuntimeError: c boom")


def test_the_same_failure_at_the_same_step_ends_the_run_with_its_reason(train_with, places):
    def at_step(step, message):
        def fail():
            ProgressFile(places.state, 0).write("training", step=step - 1)
            last_error_of(places, "ValueError", message)

        return FakeLaunch(1, ranks=[1], looks=1, while_running=fail)

    launches = [at_step(7, "seen 3 of 5"), at_step(8, "seen 3 of 5"), at_step(8, "seen 4 of 5")]
    outcome = train_with(*launches).run()
    assert outcome.state == "failed"
    assert outcome.reason == (
        "The job failed 2 times in the same way at step 8, so that starting it again does not help "
        "(shutdown.same_failures is 2): ValueError: seen 4 of 5"
    )


@pytest.mark.parametrize(("phase", "said", "tries"), [("ended", "", 1), ("between", "", 2), ("ended", "CUDA error", 2)])
def test_an_abort_after_all_was_done_and_saved_is_no_failure(train_with, places, phase, said, tries):
    def abort():
        ProgressFile(places.state, 0).write(phase, step=9)

    launches = [FakeLaunch(1, ranks=[-6], looks=1, while_running=abort, said=said or ABORTED_AT_EXIT), FakeLaunch(0)]
    assert train_with(*launches).run().state == "succeeded"
    assert len(train_with.firsts) == tries


def test_failures_from_outside_are_tried_again_until_the_budget_is_spent(train_with, places):
    def store_fails():
        last_error_of(places, "StoreError", "s3://bucket/run: no answer")

    launches = [FakeLaunch(1, ranks=[1], looks=1, while_running=store_fails) for _ in range(3)]
    launches += [FakeLaunch(1, ranks=[-9]) for _ in range(3)]
    assert train_with(*launches, FakeLaunch(0), max_restarts=9).run().state == "succeeded"


def last_error_of(places, kind, message):
    folder = places.state / last_error.FOLDER
    folder.mkdir(exist_ok=True)
    (folder / "0").write_text(json.dumps({"rank": 0, "kinds": [kind, "Exception"], "number": 0, "message": message, "time": 1.0}))


def test_a_launch_whose_ranks_hang_is_ended_at_once_and_made_anew(train_with, events):
    class Hangs:
        reason = "Rank 3 made no progress for 1800 s at step 7."

    hung = FakeLaunch(1, ranks=[-9], looks=100)
    remaining = [Hangs(), NeverHangs()]
    assert train_with(hung, FakeLaunch(0), stalls=lambda: remaining.pop(0)).run().state == "succeeded"
    assert hung.stopped_with == 0.0
    assert states(events)[1] == ("failed", "Rank 3 made no progress for 1800 s at step 7. The nodes meet anew.")


def test_a_stop_file_lets_the_ranks_leave_and_the_node_with_them(train_with, places, events):
    launch = FakeLaunch(1, ranks=[75], looks=5, while_running=lambda: places.stop_file.write_text("by hand"))
    with pytest.raises(Leave, match=r"by hand.*Remove that file"):
        train_with(launch).run()
    assert launch.stopped_with is None
    assert train_with.meet.resigned == 1
    assert [state for state, _ in states(events)] == ["started", "done"]


def test_ranks_that_ignore_the_stop_file_are_stopped(train_with, places):
    launch = FakeLaunch(1, looks=float("inf"), while_running=lambda: places.stop_file.touch())
    with pytest.raises(Leave, match="no reason given"):
        train_with(launch, stop_grace=1).run()
    assert launch.stopped_with == 10.0


def test_a_stop_file_that_is_there_already_starts_nothing(train_with, places):
    places.stop_file.write_text("by hand")
    train = train_with()
    with pytest.raises(Leave):
        train.run()


def test_torchrun_is_ended_when_the_nodes_must_regroup(train_with, events):
    def watch(watched, meeting):
        watched.regroup.reason = "The rendezvous host i-1 is gone."
        return nullcontext()

    waiting = FakeLaunch(-9, looks=1000)
    train = train_with(waiting, FakeLaunch(0, looks=0), watch=watch)
    assert train.run().state == "succeeded"
    assert waiting.stopped_with == 10.0
    assert states(events)[1] == ("failed", "The rendezvous host i-1 is gone. The nodes meet anew.")


def test_sigterm_has_the_ranks_save_before_the_node_leaves(train_with):
    def terminate():
        raise Leave("The agent was asked to stop (SIGTERM).")

    launch = FakeLaunch(1, looks=3, while_running=terminate)
    with pytest.raises(Leave, match="SIGTERM"):
        train_with(launch, stop_grace=90).run()
    assert launch.stopped_with == 95.0
    assert train_with.meet.resigned == 1


def test_the_pauses_double_and_start_anew_after_a_long_launch():
    budget = Budget(restarts=20)
    pauses = []
    for _ in range(8):
        budget.note(ran=5.0)
        pauses.append(budget.pause)
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    budget.note(ran=3600.0)
    assert budget.pause == 0.0
    assert not budget.spent


def test_launches_that_hang_for_long_at_one_step_use_up_the_budget():
    budget = Budget(restarts=3)
    for _ in range(3):
        budget.note(ran=1805.0, step=57)
    assert not budget.spent  # the first of them had come further than any before
    budget.note(ran=1805.0, step=57)
    assert budget.spent


def test_a_node_whose_machine_has_broken_does_not_try_again(train_with, events):
    def broken():
        raise Unfit("After the launch failed: accelerators: 7 of 8")

    train = train_with(FakeLaunch(1, ranks=[1]))
    train._check_again = broken
    with pytest.raises(Unfit, match="7 of 8"):
        train.run()


def test_who_came_further_is_not_kept_waiting_but_uses_up_the_budget():
    budget = Budget(restarts=3)
    pauses = []
    for step in (10, 20, 20, 25):
        budget.note(ran=5.0, step=step)
        pauses.append(budget.pause)
    assert pauses == [0.0, 0.0, 1.0, 0.0]
    assert budget.spent


REPORT = """\
E1130 14:49:46 12361 api.py:985] failed (exitcode: -9) local_rank: 1 (pid: 77) of binary: python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Failures:
[1]:
  rank      : 2 (local_rank: 0)
  exitcode  : 75 (pid: 76)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 3 (local_rank: 1)
  exitcode  : -9 (pid: 77)
"""

TRACEBACK = """\
Traceback (most recent call last):
  File "run.py", line 1032, in <module>
    main()
frame #0: c10::Error::Error(...)
RendezvousConnectionError: The connection to the C10d store has failed.
"""


@pytest.fixture
def launch_of(places, tmp_path):
    """A launch whose torchrun said something and has ended; the agent's children are left alone."""
    places.logs.mkdir(parents=True)
    places.torchrun_log.write_text("  exitcode  : 1 (pid: 1) of a launch before\n")

    def make(said):
        (tmp_path / "said").write_text(said)
        launch = TorchrunLaunch(["cat", str(tmp_path / "said")], environment={"PATH": "/usr/bin:/bin"}, places=places)
        launch._process.wait(timeout=10)
        return launch

    return make


def test_exit_codes_of_ranks_are_those_of_this_launch(launch_of):
    assert launch_of(REPORT).rank_exit_codes() == [75, -9]
    assert launch_of(TRACEBACK).rank_exit_codes() == []


def test_a_failed_rank_is_explained_by_its_own_last_lines(launch_of, places):
    for rank in (0, 1):
        log = places.rank_logs / f"generation-1_x/attempt_0/{rank}/stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text("".join(f"line {n} of rank {rank}\n" for n in range(100)))
    assert launch_of(REPORT).explanation().splitlines()[-1] == "line 99 of rank 1"
    assert len(launch_of(REPORT).explanation().splitlines()) == 12


def test_a_rank_that_died_in_silence_is_explained_too(launch_of):
    assert "kernel sends -9 when memory runs out" in launch_of(REPORT).explanation()


def test_a_lost_rendezvous_is_explained_without_stack_frames(launch_of):
    assert launch_of(TRACEBACK).explanation() == (
        "Traceback (most recent call last):\nRendezvousConnectionError: The connection to the C10d store has failed."
    )
