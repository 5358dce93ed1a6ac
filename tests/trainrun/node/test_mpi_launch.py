"""One launch of mpirun by its host and its members, with an mpirun and a daemon that do as the test says."""

from __future__ import annotations

import os
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainrun.directory import DirectoryStore
from trainrun.node.beacon import Beacon
from trainrun.node.mpi_board import Answer, Board, Ticket, Verdict
from trainrun.node.mpi_launch import MpiHost, MpiMember, MpiNode
from trainrun.node.mpi_program import Mpirun
from trainrun.node.mpi_ranks import MpiRanks
from trainrun.node.places import Places
from trainrun.node.processes import kill_descendants
from trainrun.spec import ClusterSpec, TimeoutSpec

MPIRUN = """#!/bin/sh
# Have a daemon started on each host but the first, then wait for the test's word.
for host in $(sed 1d {state}/hosts | cut -d' ' -f1); do
    /bin/sh {state}/remote-shell $host "OPAL_PREFIX=/mpi ; PATH=/elsewhere ; /bin/orted -mca hnp 'there;{folder}'"
done
while [ ! -e {folder}/end ]; do sleep 0.02; done
exit $(cat {folder}/end)
"""
DAEMON = """#!/bin/sh
echo "$@ $OPAL_PREFIX $PATH" > {folder}/daemon.new
mv {folder}/daemon.new {folder}/daemon
while [ ! -e {folder}/daemon-end ]; do sleep 0.02; done
exit 0
"""


class Stage:
    """A node and what it needs; several share a board."""

    def __init__(self, folder, store, name, **timeouts):
        self.folder = folder / name
        self.places = Places(root=self.folder)
        for place in (self.places.logs, self.places.state, self.places.mpi, self.folder / "bin"):
            place.mkdir(parents=True, exist_ok=True)
        for program, text in (("mpirun", MPIRUN), ("orted", DAEMON)):
            path = self.folder / "bin" / program
            path.write_text(text.replace("{folder}", str(self.folder)).replace("{state}", str(self.places.mpi)))
            path.chmod(0o755)
        self.board = Board(store=store, generation=1)
        self.node = MpiNode(
            mpirun=Mpirun(program=self.folder / "bin/mpirun", version="4.1.7"),
            environment={"PATH": os.environ["PATH"]},
            places=self.places,
            ranks=MpiRanks(folder=self.folder / "ranks", count=1),
            board=self.board,
            timeouts=TimeoutSpec(**{"rendezvous": 60, "peer_lost": 1, "stop_grace": 1, **timeouts}),
        )

    def rank_ends(self, code):
        folder = self.folder / "ranks/0"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stderr.log").write_text("the last words of a rank\n")
        (folder / "stdout.log").touch()
        (folder / "exit_code").write_text(str(code))

    def ends(self, what, code=0):
        (self.folder / what).write_text(str(code))


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def spare_other_tests(monkeypatch):
    """A launch ends whatever its agent has left behind; here the agent is the process of the tests, which others need."""

    def kill(pid):
        if pid != os.getpid():
            kill_descendants(pid)

    monkeypatch.setattr("trainrun.node.mpi_launch.kill_descendants", kill)


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "store")


@pytest.fixture
def beacon():
    with Beacon(address="127.0.0.1") as beacon:
        yield beacon


@pytest.fixture
def host(tmp_path, store):
    stage = Stage(tmp_path, store, "host")

    def launch(*, nodes_min=1, nodes_max=2, expected=2, last_call=30.0):
        cluster = ClusterSpec(
            name="c", instance_type="c7i.large", nodes_min=nodes_min, nodes_desired=nodes_max, nodes_max=nodes_max
        )
        return MpiHost(stage.node, cluster=cluster, expected=expected, last_call=last_call, python="/python")

    stage.launch = launch
    return stage


@pytest.fixture
def member(tmp_path, store, beacon):
    stage = Stage(tmp_path, store, "member")
    stage.ticket = Ticket.new(node="i-member", address="127.0.0.1", beacon=beacon.port)
    stage.launch = lambda: MpiMember(stage.node, ticket=stage.ticket)
    return stage


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_both_nodes_know_the_end_that_both_have_come_to(host, member):
    with member.launch() as one, host.launch() as other:
        wait_for((member.folder / "daemon").exists)
        assert (member.folder / "daemon").read_text() == f"-mca hnp there;{host.folder} /mpi {os.environ['PATH']}\n"
        assert (one.exit_code(), other.exit_code()) == (None, None)
        for stage, what in ((member, "daemon-end"), (host, "end")):
            stage.rank_ends(0)
            stage.ends(what)
        wait_for(lambda: one.exit_code() is not None and other.exit_code() is not None)
        assert (one.exit_code(), other.exit_code()) == (0, 0)


def test_an_mpirun_that_ends_with_0_although_a_node_was_lost_is_no_success(host, member):
    with member.launch() as one, host.launch() as other:
        wait_for((member.folder / "daemon").exists)
        host.rank_ends(0)
        host.ends("end", 0)  # Open MPI 5.0.11 does so
        wait_for(lambda: other.exit_code() is not None)
        assert other.exit_code() == 1
        assert other.explanation().startswith("Not all ranks of i-member came to an end.")
        member.rank_ends(0)
        member.ends("daemon-end")
        wait_for(lambda: one.exit_code() is not None)
        assert one.exit_code() == 1
        assert one.explanation().startswith("Not all ranks of i-member came to an end.")


def test_a_rank_that_fails_on_one_node_fails_the_launch_on_both(host, member):
    with member.launch() as one, host.launch() as other:
        wait_for((member.folder / "daemon").exists)
        member.rank_ends(3)
        member.ends("daemon-end")
        host.rank_ends(0)
        host.ends("end", 3)
        wait_for(lambda: one.exit_code() is not None and other.exit_code() is not None)
        assert (one.exit_code(), one.rank_exit_codes()) == (3, [3])
        assert (other.exit_code(), other.rank_exit_codes()) == (3, [])
        assert one.explanation() == "the last words of a rank"


def test_ranks_that_saved_and_left_are_no_success_either(host):
    with host.launch(expected=1) as launch:
        wait_for((host.places.mpi / "hosts").exists)
        host.rank_ends(75)
        host.ends("end", 0)
        wait_for(lambda: launch.exit_code() is not None)
        assert (launch.exit_code(), launch.rank_exit_codes()) == (75, [75])


def test_a_member_is_not_left_waiting_for_a_host_that_says_nothing(member):
    with member.launch() as launch:
        wait_for(lambda: member.board.waiting())
        member.board.answer(member.ticket, Answer(launch="1", arguments=[]))
        member.rank_ends(0)
        member.ends("daemon-end")
        wait_for(lambda: launch.exit_code() is not None)
        assert launch.exit_code() == 1
        assert "did not say how the job ended" in launch.explanation()


def test_a_member_that_is_stopped_while_it_waits_takes_its_ticket_back(member):
    with member.launch() as launch:
        wait_for(lambda: member.board.waiting())
        launch.stop(grace=30.0)
        assert launch.exit_code() == 1
    assert member.board.waiting() == []


def test_a_host_whose_members_do_not_come_says_so(tmp_path, store):
    stage = Stage(tmp_path, store, "host", rendezvous=1)
    cluster = ClusterSpec(name="c", instance_type="c7i.large", nodes_min=2, nodes_desired=2, nodes_max=2)
    with MpiHost(stage.node, cluster=cluster, expected=2, last_call=0.0, python="/python") as launch:
        wait_for(lambda: launch.exit_code() is not None)
        assert launch.exit_code() == 1
        assert "1 of at least 2 nodes came to the launch within 1 s (timeouts.rendezvous)" in launch.explanation()


def test_daemons_that_cannot_reach_mpirun_are_not_waited_for_without_end(tmp_path, store, monkeypatch):
    monkeypatch.setattr("trainrun.node.mpi_launch.MEMBERS_SECONDS", 0.1)
    stage = Stage(tmp_path, store, "host", rendezvous=1)
    cluster = ClusterSpec(name="c", instance_type="c7i.large", nodes_min=1, nodes_desired=1, nodes_max=1)
    with MpiHost(stage.node, cluster=cluster, expected=1, last_call=0.0, python="/python") as launch:
        wait_for(lambda: launch.exit_code() is not None)
        assert launch.exit_code() != 0
        assert launch.reason.startswith("No rank has started within 1 s (timeouts.rendezvous) of mpirun.")


def test_a_node_that_is_dead_already_is_not_launched_with(host):
    host.board.put_ticket(Ticket.new(node="i-dead", address="127.0.0.1", beacon=closed_port()))
    with host.launch(last_call=0.5):
        wait_for((host.places.mpi / "hosts").exists)
        assert (host.places.mpi / "hosts").read_text() == "localhost slots=1\n"


def test_a_newcomer_has_the_ranks_asked_and_all_else_ended_after_the_grace(host, beacon, monkeypatch):
    monkeypatch.setattr("trainrun.node.mpi_launch.MEMBERS_SECONDS", 0.2)
    with host.launch(expected=1) as launch:
        wait_for((host.places.mpi / "hosts").exists)
        host.board.put_ticket(Ticket.new(node="i-new", address="127.0.0.1", beacon=beacon.port))
        wait_for(lambda: launch.exit_code() is not None)  # mpirun here hears of nothing
        assert launch.exit_code() != 0
        assert launch.reason == "i-new came; the ranks were asked to save and leave."


def test_ranks_that_end_with_0_because_they_were_asked_have_not_ended_the_job(host, member, beacon, monkeypatch):
    """Programs that save at SIGTERM on all ranks commonly end so."""
    monkeypatch.setattr("trainrun.node.mpi_launch.MEMBERS_SECONDS", 0.2)
    with member.launch() as one, host.launch(nodes_max=3) as other:
        wait_for((member.folder / "daemon").exists)
        host.board.put_ticket(Ticket.new(node="i-new", address="127.0.0.1", beacon=beacon.port))
        wait_for(lambda: other.reason)
        for stage, what in ((member, "daemon-end"), (host, "end")):
            stage.rank_ends(0)
            stage.ends(what)
        wait_for(lambda: one.exit_code() is not None and other.exit_code() is not None)
        assert (one.exit_code(), other.exit_code()) == (75, 75)
        assert other.rank_exit_codes() == [75]


@pytest.mark.parametrize("asked", ["by a signal", "by the stop file"])
def test_a_member_that_was_asked_to_stop_tells_the_host_so(host, member, asked):
    with member.launch() as one, host.launch() as other:
        wait_for((member.folder / "daemon").exists)
        if asked == "by the stop file":
            member.places.stop_file.touch()
        else:
            one._stopping.set()
        for stage, what in ((member, "daemon-end"), (host, "end")):
            stage.rank_ends(0)
            stage.ends(what)
        wait_for(lambda: one.exit_code() is not None and other.exit_code() is not None)
        assert (one.exit_code(), other.exit_code()) == (75, 75)


def test_a_full_cluster_lets_nobody_else_in(host, member, beacon, monkeypatch):
    monkeypatch.setattr("trainrun.node.mpi_launch.MEMBERS_SECONDS", 0.05)
    with member.launch(), host.launch() as launch:
        wait_for((member.folder / "daemon").exists)
        host.board.put_ticket(Ticket.new(node="i-new", address="127.0.0.1", beacon=beacon.port))
        time.sleep(0.5)
        assert (launch.reason, launch.exit_code()) == ("", None)


def test_a_member_that_falls_silent_ends_the_launch(host, monkeypatch):
    monkeypatch.setattr("trainrun.node.mpi_launch.MEMBERS_SECONDS", 0.2)
    monkeypatch.setattr("trainrun.node.mpi_launch.ENDING_SECONDS", 0.5)
    with Beacon(address="127.0.0.1") as beacon:
        host.board.put_ticket(Ticket.new(node="i-gone", address="127.0.0.1", beacon=beacon.port))
        launch = host.launch()
        launch.__enter__()
        wait_for((host.places.mpi / "hosts").exists)
    wait_for(lambda: launch.exit_code() is not None)
    assert launch.reason == "i-gone did not answer for 1 s."
    assert launch.exit_code() != 0
    launch.__exit__()


def test_stopping_leaves_no_process(host):
    with host.launch(expected=1) as launch:
        wait_for(lambda: (host.places.mpi / "hosts").exists() and launch._process is not None)
        launch.stop(grace=0.2)
        assert launch.exit_code() not in (None, 0)
        assert launch._process.poll() is not None


@given(
    st.lists(
        st.tuples(st.sampled_from(["i-1", "i-2", "i-3"]), st.integers(0, 10**12), st.booleans()),
        unique_by=lambda ticket: ticket[:2],
        max_size=12,
    )
)
def test_just_the_newest_unanswered_ticket_of_each_node_waits(tmp_path_factory, put_down):
    board = Board(store=DirectoryStore(tmp_path_factory.mktemp("board")), generation=3)
    tickets = {}
    for node, number, is_answered in put_down:
        ticket = Ticket(key=f"{node}.{number:020d}", node=node, address="10.0.0.7", beacon=1)
        board.put_ticket(ticket)
        if is_answered:
            board.answer(ticket, Answer(launch="1", arguments=["-mca"]))
        tickets[ticket.key] = (ticket, is_answered)
    newest = {key.rpartition(".")[0]: key for key in sorted(tickets)}
    assert board.waiting() == [tickets[key][0] for key in newest.values() if not tickets[key][1]]
    for ticket, is_answered in tickets.values():
        assert (board.answered(ticket) is not None) == is_answered


def test_boards_of_two_claims_are_two(store):
    ticket = Ticket.new(node="i-1", address="10.0.0.7", beacon=1)
    Board(store=store, generation=1).put_ticket(ticket)
    assert Board(store=store, generation=2).waiting() == []
    board = Board(store=store, generation=1)
    board.put_verdict("1", Verdict(exit_code=3, explanation="why"))
    assert board.verdict("1") == Verdict(exit_code=3, explanation="why")
    assert (board.verdict("2"), board.exit_codes(ticket)) == (None, None)
