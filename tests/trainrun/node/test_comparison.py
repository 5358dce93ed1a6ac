"""Slow ranks, and ranks that others waited for, are named from what all nodes tell."""

from __future__ import annotations

import json

import pytest

from trainrun import progress
from trainrun.directory import DirectoryStore
from trainrun.node import comparison
from trainrun.node.claims import Claim
from trainrun.node.comparison import FEWEST, Comparison, RankReport, late_ranks, slow_ranks
from trainrun.node.events import Events
from trainrun.node.meet import Meeting
from trainrun.node.metadata import Identity
from trainrun.progress import ProgressFile

MEETING = Meeting(claim=Claim(generation=3, node="i-1", address="10.0.0.7", port=1, beacon=2), in_service=2, expected=2)


def ranks(*seconds, steps=FEWEST, arrived=None):
    arrived = arrived or [9] * len(seconds)
    return {
        rank: (f"i-{rank}", RankReport(rank=rank, step=8, arrived=arrived[rank], phase="training", seconds=each, steps=steps))
        for rank, each in enumerate(seconds)
    }


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ((0.10, 0.10, 0.21, 0.10), {2}),
        ((0.10, 0.14, 0.11, 0.10), set()),
        ((0.10, 0.30), {1}),
        ((0.001, 0.004, 0.001), set()),  # milliseconds by chance
        ((0.10,), set()),
        ((), set()),
    ],
)
def test_slow_is_half_as_long_again_as_the_median_and_not_by_chance(seconds, slow):
    assert set(slow_ranks(ranks(*seconds))) == slow


def test_nobody_is_judged_by_a_few_steps():
    assert slow_ranks(ranks(0.1, 0.1, 9.0, steps=FEWEST - 1)) == {}


@pytest.mark.parametrize(("arrived", "late"), [([9, 9, 8, 9], {2}), ([9, 9, 9, 9], set()), ([9, 8, 8, 8], set()), ([], set())])
def test_late_are_few_that_many_waited_for(arrived, late):
    assert set(late_ranks(ranks(*[0.1] * len(arrived), arrived=arrived))) == late


class Node:
    def __init__(self, tmp_path, name):
        self.state = tmp_path / name
        store = DirectoryStore(tmp_path / "run")
        self.state.mkdir()
        self.events = Events(identity=Identity(node=name, address=""), path=self.state / "events", store=store)
        self.comparison = Comparison(state=self.state, store=store, node=name, meeting=MEETING, events=self.events)

    def take_steps(self, rank, *, seconds, arrived=FEWEST + 2):
        file = ProgressFile(self.state, rank)
        for step in range(1, FEWEST + 2):
            file.write("between", step=step, own_seconds=seconds)
            self.comparison.sample()
        file.write("training", step=FEWEST + 1, arrived=arrived)

    def said(self):
        file = self.state / "events"
        return [json.loads(line)["detail"] for line in file.read_text().splitlines()] if file.exists() else []


def test_the_host_names_a_slow_rank_of_another_node_once(tmp_path):
    host, other = Node(tmp_path, "i-1"), Node(tmp_path, "i-2")
    host.take_steps(0, seconds=0.1)
    other.take_steps(1, seconds=0.25)
    for _ in range(2):
        other.comparison.tell_and_compare()
        host.comparison.tell_and_compare()
    (said,) = host.said()
    assert said.startswith("Rank 1 on i-2 is slow: of each step it takes 0.25 s until it waits for others, 2.5 times the median")
    assert other.said() == []


def test_the_host_names_the_rank_that_others_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "SETTLE_SECONDS", 0.0)
    host, other = Node(tmp_path, "i-1"), Node(tmp_path, "i-2")
    host.take_steps(0, seconds=0.1)
    other.take_steps(1, seconds=0.1, arrived=FEWEST + 1)
    other.comparison.name_late()
    host.comparison.name_late()
    assert host.said() == ["When the ranks failed, 1 of 2 waited at step 10 for rank 1 on i-2 (step 9): look there first."]
    assert other.said() == []


def test_ranks_that_tell_nothing_are_not_spoken_of(tmp_path):
    host = Node(tmp_path, "i-1")
    host.comparison.sample()
    host.comparison.tell_and_compare()
    assert progress.read(host.state) == []
    assert host.said() == []
