"""`traincluster chaos`: what it asks, refuses and chooses. That faults do what they say is shown on the local fleet."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from traincluster import chaos
from traincluster.chaos import FAULTS, ChaosError, at_random, choose_node, exercise, make
from traincluster.command import main
from trainrun.node import faults as node_faults


class FakeCluster:
    stack, group, region, account = "Stack", "Nodes", "us-east-1", "123456789012"

    def __init__(self, *nodes):
        self._nodes, self.done = list(nodes), []

    def nodes(self):
        return self._nodes

    def holder_of_rank_0(self):
        return "i-2"

    def host(self):
        return "i-1"

    def cut_power(self, nodes):
        self.done.append(("power", *nodes))
        return "cut"

    def terminate(self, node):
        self.done.append(("terminate", node))
        return "ended"

    def on_node(self, node, fault, *, seconds):
        if fault == "metadata":
            raise ChaosError("it cannot")
        self.done.append((fault, node, seconds))
        return "done"


@pytest.fixture
def cluster(monkeypatch):
    made = FakeCluster("i-1", "i-2", "i-3")
    monkeypatch.setattr(chaos, "Cluster", lambda stack, region: made)
    return made


def test_the_faults_of_nodes_are_those_that_nodes_can_make():
    ours = {fault.name: (fault.summary, fault.temporary) for fault in FAULTS if fault.on_node}
    theirs = {name: (fault.summary, fault.temporary) for name, fault in node_faults.FAULTS.items()}
    assert ours == theirs


@pytest.mark.parametrize(
    ("wanted", "luck", "expected"),
    [
        ("any", 0.0, "i-1"),
        ("any", 0.5, "i-2"),
        ("any", 1.0, "i-3"),
        ("rank0", 0.9, "i-2"),
        ("other", 0.9, "i-3"),
        ("i-3", 0.0, "i-3"),
    ],
)
def test_the_node_that_is_meant(wanted, luck, expected):
    assert choose_node(FakeCluster("i-1", "i-2", "i-3"), wanted, luck=luck) == expected


def test_a_node_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ChaosError, match=r"i-9 is no node in service of Stack. There are: i-1\."):
        choose_node(FakeCluster("i-1"), "i-9", luck=0)
    with pytest.raises(ChaosError, match="no node in service"):
        choose_node(FakeCluster(), "any", luck=0)
    with pytest.raises(ChaosError, match="only one in service"):
        choose_node(FakeCluster("i-2"), "other", luck=0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kill-worker", ("kill-worker", "i-1", 7)),
        ("kill-node", ("power", "i-1")),
        ("kill-host", ("power", "i-1")),
        ("kill-all", ("power", "i-1", "i-2")),
        ("terminate", ("terminate", "i-1")),
    ],
)
def test_each_fault_asks_whom_it_must(name, expected):
    cluster = FakeCluster("i-1", "i-2")
    make(cluster, next(fault for fault in FAULTS if fault.name == name), node="any", seconds=7, luck=0)
    assert cluster.done == [expected]


def test_the_same_seed_makes_the_same_faults():
    first, again, other = (list(itertools.islice(at_random(FAULTS, seed=seed), 20)) for seed in (7, 7, 8))
    assert first == again != other


def test_at_random_one_that_cannot_be_made_is_told_and_the_next_is_made(monkeypatch):
    now = SimpleNamespace(time=0.0)
    monkeypatch.setattr(chaos.time, "monotonic", lambda: now.time)
    monkeypatch.setattr(chaos.time, "sleep", lambda seconds: setattr(now, "time", now.time + seconds))
    cluster, told = FakeCluster("i-1"), []
    some = [fault for fault in FAULTS if fault.name in ("metadata", "kill-worker")]
    exercise(cluster, some, seed=1, every=10, duration=100, seconds=1, tell=told.append)
    assert len(told) == 10 or len(told) == 11
    assert any(text.endswith(" UTC metadata: it cannot") for text in told)
    assert len(cluster.done) == sum(text.endswith(" UTC kill-worker: i-1: done") for text in told) > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Name one fault, or give --random"),
        (["kill-worker", "--random"], "kill-worker and --random are given. Name one fault, or give --random, not both."),
        (["kill-everything"], "There is no fault 'kill-everything'. Allowed: kill-worker"),
        (["--random", "--faults", "kill-node,x"], "There is no fault 'x'"),
        (["kill-worker", "--faults", "kill-node"], "--faults says what to choose from at random"),
        (["cut-link", "--seconds", "-1"], "--seconds is -1. Allowed: 0 or more"),
        (["--random", "--every", "0"], "--every is 0. Allowed: 1 or more"),
        (["--random", "--for", "nan"], "--for is nan. Allowed: 0 or more"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, said, cluster, capsys):
    assert main(["chaos", *arguments]) == 1
    assert said in capsys.readouterr().err
    assert cluster.done == []


def test_it_asks_first_and_a_dry_run_does_nothing(cluster, capsys, monkeypatch):
    question = "TrainingClusterStack in us-east-1, account 123456789012, nodes i-1, i-2, i-3: kill-all"
    assert main(["chaos", "kill-all", "--dry-run"]) == 0
    assert capsys.readouterr().out == f"{question}. Nothing was done.\n"
    asked = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "n")
    assert main(["chaos", "kill-all"]) == 1
    assert asked == [f"{question}. Go on? [y/N] "]
    assert cluster.done == []
    monkeypatch.setattr("builtins.input", lambda text: (_ for _ in ()).throw(EOFError))
    assert main(["chaos", "kill-all"]) == 1
    assert "Give --yes." in capsys.readouterr().err
    assert main(["chaos", "kill-all", "--yes"]) == 0
    assert cluster.done == [("power", "i-1", "i-2", "i-3")]


def test_ctrl_c_ends_without_a_traceback(cluster, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(chaos, "exercise", interrupt)
    assert main(["chaos", "--random", "--yes"]) == 130
    assert capsys.readouterr().err.startswith("Interrupted.")


def test_by_default_chance_hits_one_node_at_a_time():
    assert {fault.name for fault in FAULTS if not fault.at_random} == {"kill-all", "fill-disk", "corrupt-payload"}


def test_the_list_needs_no_cluster(capsys):
    assert main(["chaos", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [fault.name for fault in FAULTS]


def test_what_aws_refuses_is_said_in_a_sentence(emulated_aws, capsys, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", emulated_aws)
    assert main(["chaos", "kill-all", "--stack", "NoSuchStack", "--region", "us-east-1", "--yes"]) == 1
    assert "AWS was asked for the stack NoSuchStack, and answered: " in capsys.readouterr().err
