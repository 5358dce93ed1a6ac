"""Finding peers in a group of moto's, and agreeing on the host of the rendezvous."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainrun.config import ConfigError
from trainrun.directory import DirectoryStore
from trainrun.node.beacon import Beacon, answers
from trainrun.node.claims import Claim, Claims
from trainrun.node.group import Group, View
from trainrun.node.meet import Meet, Meeting, Silence
from trainrun.node.metadata import Identity
from trainrun.node.outcome import Leave, StepFailed
from trainrun.spec import ClusterSpec
from trainrun.store import StoreError, open_store


class FixedGroup:
    """A group that looks as it is told to."""

    def __init__(self, *nodes, desired=2):
        self.lifecycle = dict.fromkeys(nodes, "InService")
        self.desired = desired

    def look(self):
        return View(name="nodes", desired=self.desired, lifecycle=dict(self.lifecycle))


@pytest.fixture
def beacon():
    with Beacon(address="127.0.0.1") as beacon:
        yield beacon


def meet_of(node, *, group, store, beacon=1, nodes_min=1, usable=(), peer_lost=0.0, ended=lambda: "", **others):
    cluster = ClusterSpec(
        name="c", instance_type="c7i.large", nodes_min=nodes_min, nodes_desired=4, nodes_max=4, nodes_usable=usable
    )
    return Meet(
        identity=Identity(node=node, address="127.0.0.1"),
        port=29400,
        beacon=beacon,
        group=group,
        claims=Claims(store=store),
        cluster=cluster,
        peer_lost=peer_lost,
        ended=ended,
        **others,
    )


class Told(Exception):
    """Ends a wait that would go on, when it tells what it waits for."""


def stop_waiting(text):
    raise Told(text)


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "run")


def test_a_node_finds_its_group_and_peers(aws, group):
    group.create(desired=3)
    first, second, third = group.instances()
    view = Group(node=second, region="us-east-1").look()
    assert (view.name, view.desired, view.in_service()) == (group.name, 3, {first, second, third})


def test_a_terminated_peer_is_gone_and_its_replacement_there(aws, group):
    group.create(desired=2)
    first, second = group.instances()
    seen_by_first = Group(node=first, region="us-east-1")
    replacement = group.lose(second)
    assert seen_by_first.look().in_service() == {first, replacement}
    assert not seen_by_first.look().holds(second)


def test_a_node_of_no_group_is_told_so(aws, group):
    assert Group(node="i-00000000000000000", region="us-east-1").look() is None


def test_scale_to_zero_leaves_no_instance(aws, group):
    group.create(desired=2)
    Group(node=group.instances()[0], region="us-east-1").scale_to_zero()
    described = group.describe()
    assert (described["MinSize"], described["DesiredCapacity"], described["Instances"]) == (0, 0, [])


def test_instances_that_leave_are_neither_held_nor_in_service():
    lifecycle = {"a": "InService", "b": "Pending", "c": "Terminating:Wait", "d": "Standby"}
    view = View(name="nodes", desired=2, lifecycle=lifecycle)
    assert view.in_service() == {"a"}
    assert [node for node in lifecycle if view.holds(node)] == ["a", "b"]


def test_the_first_to_claim_hosts_and_a_newcomer_follows(store, beacon):
    group = FixedGroup("i-1", "i-2")
    first = meet_of("i-2", group=group, store=store, beacon=beacon.port).wait(timeout=5)
    later = meet_of("i-1", group=group, store=store).wait(timeout=5)
    assert first.claim == later.claim
    assert (first.claim.node, first.claim.generation, first.in_service) == ("i-2", 1, 2)


def test_a_host_that_left_the_group_is_followed_up_at_once(store, beacon):
    group = FixedGroup("i-1", "i-2")
    meet_of("i-1", group=group, store=store, beacon=beacon.port).wait(timeout=5)
    del group.lifecycle["i-1"]
    assert meet_of("i-2", group=group, store=store, peer_lost=1000).wait(timeout=5).claim.node == "i-2"


def test_a_host_that_is_dead_but_still_listed_is_followed_up_after_peer_lost(store, beacon):
    group = FixedGroup("i-1", "i-2")
    with Beacon(address="127.0.0.1") as dying:
        meet_of("i-1", group=group, store=store, beacon=dying.port).wait(timeout=5)
    with pytest.raises(Told, match=r"The rendezvous host i-1 does not answer.*security group"):
        meet_of("i-2", group=group, store=store, beacon=beacon.port, peer_lost=1000, report=stop_waiting).wait(timeout=0.7)
    met = meet_of("i-2", group=group, store=store, beacon=beacon.port, peer_lost=0.6).wait(timeout=5)
    assert (met.claim.node, met.claim.generation) == ("i-2", 2)


def test_a_host_that_comes_back_in_time_stays_host(store, beacon):
    group = FixedGroup("i-1", "i-2")
    with Beacon(address="127.0.0.1") as dying:
        meet_of("i-1", group=group, store=store, beacon=dying.port).wait(timeout=5)
    came_back = threading.Timer(0.3, lambda: meet_of("i-1", group=group, store=store, beacon=beacon.port).wait(timeout=5))
    came_back.start()
    met = meet_of("i-2", group=group, store=store, peer_lost=1000).wait(timeout=5)
    came_back.join()
    assert (met.claim.node, met.claim.beacon) == ("i-1", beacon.port)


def test_a_host_that_resigned_is_followed_up_at_once(store, beacon):
    group = FixedGroup("i-1", "i-2")
    leaving = meet_of("i-1", group=group, store=store, beacon=beacon.port)
    leaving.wait(timeout=5)
    claims = Claims(store=store)
    leaving.resign()
    deadline = time.monotonic() + 5
    while claims.newest().node:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert meet_of("i-2", group=group, store=store, peer_lost=1000).wait(timeout=5).claim.node == "i-2"
    leaving._resign()  # it is host no more: nothing to give up
    assert claims.newest().node == "i-2"


def test_too_few_nodes_in_service_is_said(store):
    meet = meet_of("i-1", group=FixedGroup("i-1"), store=store, nodes_min=2)
    with pytest.raises(StepFailed, match=r"within 0.2 s .timeouts.meet.. 1 of at least 2 nodes.*activity history"):
        meet.wait(timeout=0.2)


def test_a_run_that_has_begun_waits_on_for_nodes_and_tells_so(store, beacon):
    group = FixedGroup("i-1", "i-2")
    meet_of("i-1", group=group, store=store, beacon=beacon.port).wait(timeout=5)
    del group.lifecycle["i-1"]
    told = []

    def tell(text):
        told.append(text)
        if len(told) == 2:
            group.lifecycle["i-3"] = "InService"

    late = meet_of("i-2", group=group, store=store, beacon=beacon.port, nodes_min=2, report=tell)  # of a new agent, too
    assert late.wait(timeout=0.1).claim.node == "i-2"
    assert len(told) == 2 and "The run has begun, so that they wait on. 1 of at least 2 nodes are in service" in told[0]


def test_a_store_that_is_away_for_long_ends_no_run(store, monkeypatch):
    def newest(_):
        raise StoreError("no way to S3")

    monkeypatch.setattr(Claims, "newest", newest)
    with pytest.raises(Told, match="A request failed: no way to S3"):
        meet_of("i-1", group=FixedGroup("i-1"), store=store, report=stop_waiting).wait(timeout=0.2)


def test_a_group_without_capacity_lets_the_node_go(store):
    with pytest.raises(Leave, match="capacity 0"):
        meet_of("i-1", group=FixedGroup("i-1", desired=0), store=store).wait(timeout=5)


def test_a_node_that_is_being_terminated_does_not_meet(store):
    group = FixedGroup("i-1", "i-2")
    group.lifecycle["i-1"] = "Terminating"
    with pytest.raises(Leave, match="this node: Terminating"):
        meet_of("i-1", group=group, store=store).wait(timeout=5)


def test_a_run_that_has_ended_is_not_met_for(store):
    with pytest.raises(Leave, match="succeeded without"):
        meet_of("i-1", group=FixedGroup("i-1"), store=store, ended=lambda: "It succeeded without you.").wait(timeout=5)


def test_nodes_regroup_when_the_host_changes_or_goes(store, beacon):
    group = FixedGroup("i-1", "i-2", "i-3")
    host = meet_of("i-1", group=group, store=store, beacon=beacon.port)
    host.wait(timeout=5)
    other = meet_of("i-2", group=group, store=store, peer_lost=1000)
    meeting = other.wait(timeout=5)
    assert other.lost(meeting, Silence()) == ""
    group.lifecycle["i-1"] = "Terminating:Wait"
    assert other.lost(meeting, Silence()) == "The rendezvous host i-1 is gone."
    meet_of("i-3", group=group, store=store).wait(timeout=5)
    assert other.lost(meeting, Silence()) == "The rendezvous host i-1 is no more: i-3 hosts it now."


class TestSparesOfELA10:
    """ELA-10: the global batch stays; nodes among which it does not divide wait until there are enough."""

    def meets(self, *nodes, store, beacon, usable=(2, 4)):
        group = FixedGroup(*nodes, desired=4)
        return group, [
            meet_of(node, group=group, store=store, beacon=beacon.port, usable=usable, peer_lost=1000) for node in nodes
        ]

    def test_three_of_which_two_can_train(self, store, beacon):
        _, meets = self.meets("i-1", "i-2", "i-3", store=store, beacon=beacon)
        assert [meet.wait(timeout=5).claim.nodes for meet in meets] == [2, 2, 2]

    def test_a_fourth_lets_all_train_once_it_is_ready_not_when_it_is_only_listed(self, store, beacon):
        group, meets = self.meets("i-1", "i-2", "i-3", store=store, beacon=beacon)
        host, *others = (meet.wait(timeout=5) for meet in meets)
        group.lifecycle["i-4"] = "InService"  # it boots
        assert meets[0].lost(host, Silence()) == ""
        fourth = meet_of("i-4", group=group, store=store, usable=(2, 4), peer_lost=1000)
        assert fourth.wait(timeout=5).claim.nodes == 2
        assert meets[0].lost(host, Silence()) == "4 nodes are ready, of which 4 can train together: 2 did."
        assert meets[0].wait(timeout=5).claim.nodes == 4
        for meet, meeting in zip(meets[1:], others, strict=True):
            assert "no more: i-1 hosts it now" in meet.lost(meeting, Silence())
            assert meet.wait(timeout=5).claim.nodes == 4

    def meets_but_for_one(self, *, store, beacon, rendezvous):
        """Four are in service, of which i-4 never comes; the host, the others, and their first meetings."""
        group = FixedGroup("i-1", "i-2", "i-3", "i-4", desired=4)
        settings = {"group": group, "store": store, "beacon": beacon.port, "usable": (2, 4), "rendezvous": rendezvous}
        meets = [meet_of(f"i-{n}", **settings, peer_lost=1000) for n in (1, 2, 3)]
        return group, meets, [meet.wait(timeout=5) for meet in meets]

    def test_who_is_in_service_but_does_not_come_is_waited_for_one_rendezvous_long(self, store, beacon):
        _, (host, *others), meetings = self.meets_but_for_one(store=store, beacon=beacon, rendezvous=0.3)
        assert [meeting.claim.nodes for meeting in meetings] == [4, 4, 4]
        time.sleep(0.35)  # until torchrun's rendezvous gives up
        smaller = host.wait(timeout=5)
        assert (smaller.claim.nodes, smaller.claim.generation) == (2, 2)
        assert [meet.wait(timeout=5).claim for meet in others] == 2 * [smaller.claim]
        assert host.wait(timeout=5).claim == smaller.claim  # as after a rank's crash
        assert host.lost(smaller, Silence()) == ""

    def test_who_comes_late_is_let_in(self, store, beacon):
        group, (host, *others), _ = self.meets_but_for_one(store=store, beacon=beacon, rendezvous=0.3)
        time.sleep(0.35)
        smaller = host.wait(timeout=5)
        late = meet_of("i-4", group=group, store=store, usable=(2, 4), peer_lost=1000)
        for meet in (*others, late):
            meet.wait(timeout=5)
        assert host.lost(smaller, Silence()) == "4 nodes are ready, of which 4 can train together: 2 did."
        assert host.wait(timeout=5).claim.nodes == 4

    def test_a_launch_that_all_came_to_says_nothing_of_a_replacement_that_boots(self, store, beacon):
        group, (host, *_), (meeting, *_) = self.meets_but_for_one(store=store, beacon=beacon, rendezvous=0.3)
        meet_of("i-4", group=group, store=store, usable=(2, 4), peer_lost=1000).wait(timeout=5)
        assert host.lost(meeting, Silence()) == ""
        time.sleep(0.35)  # they train
        del group.lifecycle["i-4"]
        group.lifecycle["i-5"] = "InService"
        assert host.wait(timeout=5).claim == meeting.claim
        time.sleep(0.35)
        assert host.wait(timeout=5).claim.nodes == 2

    def test_too_few_without_who_does_not_come_wait_for_it(self, store, beacon):
        group = FixedGroup("i-1", "i-2", desired=4)
        host = meet_of("i-1", group=group, store=store, beacon=beacon.port, usable=(2, 4), peer_lost=1000, rendezvous=0.0)
        assert [host.wait(timeout=5).claim.nodes for _ in range(3)] == [2, 2, 2]

    def test_one_is_too_few(self, store, beacon):
        _, (meet,) = self.meets("i-1", store=store, beacon=beacon)
        with pytest.raises(StepFailed, match=r"1 of at least 2 nodes are in service in nodes \(the batch divides among 2, 4\)"):
            meet.wait(timeout=0.2)

    @pytest.mark.parametrize("usable", [(4, 2), (2, 2), (2, 5), (0, 2)])
    def test_numbers_that_cannot_be_are_refused(self, usable):
        with pytest.raises(ConfigError, match=r"nodes_usable is .* Allowed: ascending numbers from 1 to 4"):
            ClusterSpec(name="c", instance_type="t", nodes_min=1, nodes_desired=4, nodes_max=4, nodes_usable=usable)


def test_a_beacon_shines_until_it_is_closed():
    with Beacon(address="127.0.0.1") as beacon:
        assert answers("127.0.0.1", beacon.port)
        assert answers("127.0.0.1", beacon.port)
    assert not answers("127.0.0.1", beacon.port)


CLAIM = Claim(generation=1, node="i-1", address="10.0.0.7", port=29400, beacon=40000)


@pytest.mark.parametrize("kind", ["directory", "s3"])
def test_of_nodes_that_claim_at_once_exactly_one_succeeds(kind, aws, store):
    claims = Claims(store=store if kind == "directory" else open_store(f"s3://{aws.bucket}/prefix/demo"))
    assert claims.newest() is None
    won = []
    threads = [
        threading.Thread(target=lambda n=n: won.append(n) if claims.take(replace(CLAIM, node=n)) else None)
        for n in ("i-1", "i-2", "i-3", "i-4")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [claims.newest().node] == won


def test_a_claim_of_a_newer_agent_is_read_without_the_fields_that_are_new(store):
    store.put("rendezvous/00000001.json", json.dumps({**asdict(CLAIM), "colour": "red"}).encode())
    assert Claims(store=store).newest() == CLAIM


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff", b"{}"])
def test_an_object_that_is_no_claim_is_followed_up(text, store, beacon, caplog):
    assert Claims(store=store).take(CLAIM)
    store.put("rendezvous/00000002.json", text)
    store.put("rendezvous/notes.txt", b"of somebody")
    met = meet_of("i-2", group=FixedGroup("i-2"), store=store, beacon=beacon.port).wait(timeout=5)
    assert (met.claim.node, met.claim.generation) == ("i-2", 3)
    assert "00000002.json is no claim" in caplog.text


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whatever_the_order_all_that_live_agree_on_one_live_host(tmp_path_factory, data):
    """Nodes come, look, lose their place and look again in any order; when all have looked once more, all agree."""
    store = DirectoryStore(tmp_path_factory.mktemp("run"))
    group = FixedGroup(desired=9)
    living = set()
    with Beacon(address="127.0.0.1") as beacon:

        def look(node):
            return meet_of(node, group=group, store=store, beacon=beacon.port)._try(Silence())

        for _ in range(data.draw(st.integers(1, 12))):
            node = data.draw(st.sampled_from(["i-1", "i-2", "i-3", "i-4"]))
            if node in living and data.draw(st.booleans()):
                living.discard(node)
                del group.lifecycle[node]
            else:
                living.add(node)
                group.lifecycle[node] = "InService"
                look(node)
        rounds = [[look(node) for node in data.draw(st.permutations(sorted(living)))] for _ in range(2)]
    hosts = {met.claim for met in rounds[-1] if isinstance(met, Meeting)}
    assert len(rounds[-1]) == len(living)
    assert len(hosts) == (1 if living else 0)
    assert {host.node for host in hosts} <= living
