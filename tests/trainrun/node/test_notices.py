"""Notices to a node, each kind by itself, several at once, and what becomes of the node."""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from botocore.client import BaseClient
from botocore.exceptions import ClientError
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from trainrun.deadline import seconds_in
from trainrun.directory import DirectoryStore
from trainrun.node import departure as departure_module
from trainrun.node.capacity_end import CapacityBlockEnd, capacity_block_end
from trainrun.node.departure import Departure, leave_if_asked
from trainrun.node.events import Events
from trainrun.node.metadata import Identity, Metadata, MetadataError
from trainrun.node.notices import RebalanceRecommendation, ScheduledEvents, SpotInterruption, Termination
from trainrun.node.outcome import Leave
from trainrun.node.periodic import Periodic
from trainrun.node.watch import Watch
from trainrun.spec import ClusterSpec
from trainrun.spec_cluster import group_drains, hook_heartbeat, nodes_save, terminations_begin
from trainrun.store import StoreError

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)
SPOT = "spot/instance-action"
REBALANCE = "events/recommendations/rebalance"
SCHEDULED = "events/maintenance/scheduled"
LIFECYCLE = "autoscaling/target-lifecycle-state"
REFUSED = ClientError({"Error": {"Code": "ValidationError", "Message": "No active Lifecycle Action found"}}, "Complete")


class FakeGroup:
    """Takes note of what it is told. ``refusals`` come first."""

    def __init__(self):
        self.told, self.refusals = [], 0

    def _take(self, what):
        if self.refusals:
            self.refusals -= 1
            raise REFUSED
        self.told.append(what)

    def replace_me(self, reason):
        self._take("replace")

    def complete_hook(self, name):
        self._take(f"complete {name}")

    def heartbeat_hook(self, name):
        self._take(f"heartbeat {name}")


class Node:
    """A watch over a mapping of metadata items, at a time that stands still."""

    def __init__(self, folder, *, stop_grace=90.0, hook="leave", ask=None, ends=None, store=None):
        self.folder, self.items, self.now, self.group = folder, {}, NOW, FakeGroup()
        self.ends = ends
        self.departure = Departure(stop_file=folder / "stop", stop_grace=stop_grace, group=self.group, hook=hook)
        identity = Identity(node="i-1", address="10.0.0.7")
        cluster = ClusterSpec(name="test", instance_type="p5.48xlarge", nodes_min=1, nodes_desired=2, nodes_max=2)
        self.watch = Watch(
            kinds=[
                SpotInterruption(now=lambda: self.now),
                Termination(),
                RebalanceRecommendation(),
                ScheduledEvents(stop_grace=stop_grace, now=lambda: self.now),
                CapacityBlockEnd(cluster, stop_grace=stop_grace, find=lambda: self.ends, now=lambda: self.now),
            ],
            ask=ask or self.items.get,
            drills=folder / "drills",
            departure=self.departure,
            save_file=folder / "save",
            events=Events(identity=identity, path=folder / "events", store=store or DirectoryStore(folder / "run")),
        )
        self.look = self.watch.look

    def reported(self):
        path = self.folder / "events"
        return [json.loads(line)["detail"] for line in path.read_text().splitlines()] if path.exists() else []

    def stop(self):
        path = self.folder / "stop"
        return path.read_text() if path.exists() else ""

    def seconds(self):
        return seconds_in(self.stop(), otherwise=0.0) if self.stop() else -1.0


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def spot(ahead=120.0, *, now=NOW, action="terminate"):
    return json.dumps({"action": action, "time": f"{now + timedelta(seconds=ahead):%Y-%m-%dT%H:%M:%SZ}"})


def scheduled(*, ahead, state="active", code="system-reboot", name="instance-event-1", now=NOW):
    begins = now + ahead
    return {
        "NotBefore": f"{begins:%d %b %Y %H:%M:%S} GMT",
        "NotAfter": f"{begins + timedelta(minutes=17):%d %b %Y %H:%M:%S} GMT",
        "Code": code,
        "Description": f"scheduled {code}",
        "EventId": name,
        "State": state,
    }


def test_no_notice_does_nothing(node):
    node.items[LIFECYCLE] = "InService"
    node.items[SCHEDULED] = "[]"
    node.look()
    assert (node.stop(), node.reported(), node.group.told) == ("", [], [])
    leave_if_asked(node.folder / "stop")


class TestSpotInterruption:
    def test_it_asks_all_ranks_to_stop_once(self, node):
        node.items[SPOT] = spot()
        with node.departure.training():
            node.look()
            node.look()
        assert node.stop() == "90 seconds left; spot interruption notice: terminate at 2026-11-30T12:02:00Z\n"
        (line,) = node.reported()
        assert line.endswith("All ranks are asked to save within 90 s; this node leaves and is replaced.")
        with pytest.raises(Leave, match="spot interruption notice"):
            leave_if_asked(node.folder / "stop")

    @pytest.mark.parametrize(("ahead", "told"), [(40, 40), (120, 90), (-40, 90), (7200, 90)])
    def test_the_ranks_are_told_how_long_they_have_whatever_the_clock(self, node, ahead, told):
        """The notice's time, if the agent would not end them before. One in the past is a clock that is wrong."""
        node.items[SPOT] = spot(ahead)
        node.look()
        assert node.seconds() == told

    def test_a_clock_that_is_behind_gives_no_more_than_two_minutes(self, tmp_path):
        node = Node(tmp_path, stop_grace=600)
        node.items[SPOT] = spot(3600)
        node.look()
        assert node.seconds() == 120

    @pytest.mark.parametrize("document", ["terminate!", '{"action": "term', "[]", '{"action": "stop"}', ""])
    def test_a_notice_that_cannot_be_read_is_a_notice(self, node, document):
        node.items[SPOT] = document
        node.look()
        assert node.stop() == f"90 seconds left; spot interruption notice: {document}\n"

    def test_the_group_hears_once_the_ranks_have_left(self, node):
        node.items[SPOT] = spot()
        with node.departure.training():
            node.look()
            node.look()
            assert node.group.told == []
        node.departure.carry_out()
        node.departure.carry_out()
        assert node.group.told == ["replace"]

    def test_where_nothing_trains_yet_the_group_hears_at_once(self, node):
        node.items[SPOT] = spot()
        node.look()
        assert node.group.told == ["replace"]

    def test_a_group_that_does_not_take_the_word_hears_it_again(self, node, monkeypatch):
        monkeypatch.setattr(departure_module, "LINGER_SECONDS", 0.0)
        node.items[SPOT] = spot()
        node.group.refusals = 3
        with pytest.raises(ClientError):
            node.look()
        node.departure.carry_out()
        assert node.group.told == ["replace"]


class TestRebalance:
    def test_it_asks_for_a_checkpoint_once_and_stops_nothing(self, node):
        node.items[REBALANCE] = '{"noticeTime": "2026-11-30T12:00:00Z"}'
        node.look()
        first = (node.folder / "save").stat().st_mtime_ns
        node.look()
        assert (node.folder / "save").stat().st_mtime_ns == first
        assert (node.folder / "save").read_text() == "rebalance recommendation of 2026-11-30T12:00:00Z\n"
        assert (node.stop(), len(node.reported()), node.group.told) == ("", 1, [])

    def test_a_second_one_asks_again(self, node):
        for number in range(2):
            node.items[REBALANCE] = json.dumps({"noticeTime": f"2026-11-30T12:0{number}:00Z"})
            node.look()
        assert len(node.reported()) == 2


class TestScheduledEvents:
    def test_it_is_reported_at_first_sight_and_the_node_leaves_a_margin_before(self, node):
        node.items[SCHEDULED] = json.dumps([scheduled(ahead=timedelta(days=3))])
        node.look()
        node.look()
        assert (len(node.reported()), node.stop()) == (1, "")
        assert "system-reboot, not before 03 Dec 2026 12:00:00 GMT" in node.reported()[0]
        node.now += timedelta(days=3, minutes=-16)
        node.look()
        assert node.stop() == ""
        node.now += timedelta(minutes=1)
        node.look()
        node.look()
        assert node.stop().startswith("90 seconds left; scheduled event system-reboot")
        assert (len(node.reported()), node.group.told) == (2, ["replace"])

    @pytest.mark.parametrize("state", ["completed", "canceled"])
    def test_one_that_is_over_or_called_off_is_none(self, node, state):
        node.items[SCHEDULED] = json.dumps([scheduled(ahead=timedelta(minutes=1), state=state)])
        node.look()
        assert (node.reported(), node.stop()) == ([], "")

    def test_one_that_is_put_off_is_reported_anew(self, node):
        for days in (3, 5):
            node.items[SCHEDULED] = json.dumps([scheduled(ahead=timedelta(days=days))])
            node.look()
        node.now += timedelta(days=3)
        node.look()
        assert (len(node.reported()), node.stop()) == (2, "")

    @pytest.mark.parametrize("document", ['[{"NotBefore": "21 Ja', '{"message": "later"}', "[1]", "null", ""])
    def test_a_document_that_is_torn_is_read_again(self, node, document):
        node.items[SCHEDULED] = document
        node.look()
        assert (node.reported(), node.stop()) == ([], "")
        node.items[SCHEDULED] = json.dumps([scheduled(ahead=timedelta(minutes=5))])
        node.look()
        assert node.stop()

    def test_a_time_that_cannot_be_read_is_reported(self, node):
        node.items[SCHEDULED] = json.dumps([{**scheduled(ahead=timedelta(days=1)), "NotBefore": "soon"}])
        node.look()
        node.look()
        assert (len(node.reported()), node.stop()) == (1, "")


class TestCapacityBlock:
    ENDS = datetime(2026, 12, 24, 11, 30, tzinfo=timezone.utc)

    @pytest.mark.parametrize(("instance_type", "minutes"), [("p5.48xlarge", 30), ("p6e-gb200.36xlarge", 60)])
    def test_the_moments_follow_each_other(self, instance_type, minutes):
        begins = terminations_begin(self.ENDS, instance_type=instance_type)
        assert self.ENDS - begins == timedelta(minutes=minutes)
        drains = group_drains(self.ENDS, instance_type=instance_type)
        saves = nodes_save(self.ENDS, instance_type=instance_type, stop_grace=900)
        assert saves + timedelta(seconds=900) < drains < begins

    def test_the_run_saves_and_stops_and_nobody_is_replaced(self, node):
        node.ends = self.ENDS
        node.look()
        node.look()
        (line,) = node.reported()
        assert "the Capacity Block ends at 2026-12-24 11:30 UTC" in line.lower().replace("utc", "UTC").replace(
            "capacity b", "Capacity B"
        )
        node.now = nodes_save(self.ENDS, instance_type="p5.48xlarge", stop_grace=90)
        node.look()
        node.look()
        assert node.stop().startswith("90 seconds left; the Capacity Block ends at 2026-12-24 11:30 UTC")
        assert node.departure.ends_run.startswith("the Capacity Block ends at")
        assert (len(node.reported()), node.group.told) == (2, [])

    def test_a_spot_like_notice_beside_it_asks_for_no_replacement(self, node):
        node.ends, node.now = self.ENDS, self.ENDS
        node.items[SCHEDULED] = json.dumps([scheduled(ahead=timedelta(0), now=self.ENDS)])
        with node.departure.training():
            node.look()
        node.departure.carry_out()
        assert node.group.told == []

    def test_the_end_that_the_cluster_names_is_not_asked_for(self):
        cluster = ClusterSpec(
            name="test",
            instance_type="p5.48xlarge",
            nodes_min=1,
            nodes_desired=1,
            nodes_max=1,
            capacity_ends=self.ENDS.isoformat(),
        )
        end = CapacityBlockEnd(cluster, stop_grace=90, find=lambda: pytest.fail("asked"), now=lambda: NOW)
        (notice,) = end.look(lambda path: None)
        assert notice.text.endswith("the run saves and stops at 2026-12-24 10:47 UTC")

    def test_ec2_that_fails_is_asked_again(self, tmp_path, monkeypatch):
        node = Node(tmp_path)
        answers = [REFUSED, self.ENDS]

        def find():
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr("trainrun.node.capacity_end.ASK_AGAIN_SECONDS", 0.0)
        node.watch._kinds[-1]._find = find
        with pytest.raises(ClientError):
            node.look()
        node.look()
        assert len(node.reported()) == 1

    def test_ec2_names_the_end_of_a_block_only(self, group, monkeypatch):
        """moto has no Capacity Blocks: it answers for the instance, the reservation is told here."""
        group.create(desired=1)
        (instance,) = group.instances()
        find = capacity_block_end(node=instance, region="us-east-1")
        assert find() is None
        kinds = iter(["capacity-block", "default"])
        call = BaseClient._make_api_call

        def answer(client, operation, arguments):
            if operation == "DescribeInstances":
                return {"Reservations": [{"Instances": [{"InstanceId": instance, "CapacityReservationId": "cr-1"}]}]}
            if operation == "DescribeCapacityReservations":
                assert arguments == {"CapacityReservationIds": ["cr-1"]}
                return {"CapacityReservations": [{"EndDate": self.ENDS, "ReservationType": next(kinds)}]}
            return call(client, operation, arguments)

        monkeypatch.setattr(BaseClient, "_make_api_call", answer)
        assert find() == self.ENDS
        assert find() is None


class TestTermination:
    def test_the_node_saves_and_completes_the_hook_when_it_has(self, node, monkeypatch):
        monkeypatch.setattr(departure_module, "LINGER_SECONDS", 0.0)
        node.items[LIFECYCLE] = "InService"
        with node.departure.training():
            node.look()
            assert node.stop() == ""
            node.items[LIFECYCLE] = "Terminated"
            node.look()
            node.look()
            assert node.seconds() == 90
            assert node.group.told == []
        node.departure.carry_out()
        node.group.refusals = 2  # the group is not waiting yet
        node.departure.linger(node.items.get)
        node.departure.linger(node.items.get)
        assert node.group.told == ["complete leave"]
        assert len(node.reported()) == 1

    def test_a_save_that_takes_long_has_the_group_wait(self, tmp_path, monkeypatch):
        node = Node(tmp_path, stop_grace=20_000)
        node.items[LIFECYCLE] = "Terminated"
        clock = [1000.0]
        monkeypatch.setattr(departure_module.time, "monotonic", lambda: clock[0])
        with node.departure.training():
            node.look()
            for _ in range(4):
                clock[0] += hook_heartbeat(20_000) / 4 + 1
                node.look()
        assert node.group.told == ["heartbeat leave"] * 2

    def test_a_node_that_trains_nothing_completes_it_at_once(self, node):
        node.items[LIFECYCLE] = "Terminated"
        node.look()
        assert node.group.told == ["complete leave"]

    def test_without_a_hook_nobody_lingers(self, tmp_path):
        node = Node(tmp_path, hook="")
        node.items[LIFECYCLE] = "Terminated"
        node.look()
        node.departure.linger(lambda path: pytest.fail("asked"))
        assert (bool(node.stop()), node.group.told) == (True, [])

    def test_who_lingers_outlives_a_service_that_fails(self, node, monkeypatch):
        monkeypatch.setattr(departure_module, "LINGER_SECONDS", 0.0)
        answers = iter([MetadataError("no"), "InService", "Terminated"])

        def ask(path):
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        node.departure.linger(ask)
        assert node.group.told == ["complete leave"]

    @pytest.mark.parametrize(("grace", "heartbeat"), [(1, 61), (90, 150), (20_000, 7200)])
    def test_the_hook_waits_as_long_as_the_api_allows(self, grace, heartbeat):
        assert hook_heartbeat(grace) == heartbeat


class TestSeveral:
    def test_the_first_to_end_counts_and_each_is_reported(self, node):
        node.items |= {REBALANCE: "{}", SPOT: spot(30), LIFECYCLE: "Terminated"}
        node.items[SCHEDULED] = json.dumps([scheduled(ahead=timedelta(seconds=60))])
        with node.departure.training():
            node.look()
        assert node.seconds() == 30
        assert len(node.reported()) == 4
        node.departure.carry_out()
        node.departure.linger(node.items.get)
        assert node.group.told == ["replace", "complete leave"]

    def test_a_stop_file_of_somebody_elses_does_not_give_more_time(self, node):
        (node.folder / "stop").write_text("maintenance\n")
        node.items[SPOT] = spot(40)
        node.look()
        assert node.seconds() == 40

    def test_a_person_who_ends_the_run_is_not_overruled_by_a_notice(self, node):
        (node.folder / "stop").write_text("End the run: the data is wrong\n")
        node.items[SPOT] = spot()
        node.look()
        assert node.stop().startswith("90 seconds left; end the run: the data is wrong; spot interruption notice")
        node.items[LIFECYCLE] = "Terminated"
        node.look()
        node.departure.carry_out()
        assert (node.departure.ends_run, "replace" in node.group.told) == ("the data is wrong", False)

    def test_a_person_who_gives_less_time_gives_less_time(self, node):
        (node.folder / "stop").write_text("20 maintenance\n")
        node.items[SPOT] = spot(40)
        node.look()
        assert 15 <= node.seconds() <= 20

    @pytest.mark.parametrize("taken_back", [False, True])
    def test_the_next_agent_carries_out_what_one_that_was_killed_was_asked_for(self, node, taken_back):
        (node.folder / "drills/spot").mkdir(parents=True)
        (node.folder / "drills" / SPOT).write_text(spot())
        with node.departure.training():
            node.look()
        if taken_back:
            (node.folder / "stop").unlink()
        for _ in range(2):
            again = Node(node.folder)
            again.look()
            again.departure.carry_out()
            assert again.group.told == ([] if taken_back else ["replace"])

    def test_the_next_agent_ends_the_run_that_one_was_to_end(self, node):
        node.ends = node.now
        node.look()
        assert Node(node.folder).departure.ends_run == node.departure.ends_run != ""
        (node.folder / "departure.json").write_text("[]")
        assert Node(node.folder).departure.ends_run == ""

    def test_a_notice_while_the_store_is_down_delays_nothing(self, tmp_path):
        class Down(DirectoryStore):
            def put(self, key, data):
                raise StoreError("down")

        node = Node(tmp_path, store=Down(tmp_path / "run"))
        node.items[SPOT] = spot()
        node.look()
        assert (node.seconds(), len(node.reported())) == (90, 1)

    def test_a_disk_that_is_full_delays_a_notice_and_loses_none(self, node, monkeypatch):
        node.items[SPOT] = spot()
        write, full = departure_module.write_whole, [OSError(28, "No space left on device")]

        def write_whole(file, text):
            if full:
                raise full.pop()
            write(file, text)

        monkeypatch.setattr(departure_module, "write_whole", write_whole)
        with pytest.raises(OSError, match="No space"):
            node.look()
        node.look()
        assert node.seconds() == 90


class TestDrills:
    def test_a_file_is_taken_as_a_notice_once_and_is_gone(self, node):
        file = node.folder / "drills" / SPOT
        file.parent.mkdir(parents=True)
        file.write_text(spot())
        node.look()
        node.look()
        assert (file.exists(), node.seconds(), len(node.reported()), node.group.told) == (False, 90, 1, ["replace"])

    def test_it_waits_for_no_look_and_the_service_is_asked_no_more_often_for_it(self, tmp_path):
        asked = []
        node = Node(tmp_path, ask=asked.append)
        for _ in range(3):
            node.watch.look_when_due()
        assert len(asked) == 4
        (tmp_path / "drills/spot").mkdir(parents=True)
        (tmp_path / "drills/spot/other").touch()
        node.watch.look_when_due()
        assert len(asked) == 4
        (tmp_path / "drills" / SPOT).write_text(spot())
        node.watch.look_when_due()
        assert node.stop()

    def test_it_needs_no_metadata_service(self, tmp_path):
        def ask(path):
            raise MetadataError("no")

        node = Node(tmp_path, ask=ask)
        (tmp_path / "drills/spot").mkdir(parents=True)
        (tmp_path / "drills" / SPOT).write_text(spot())
        with pytest.raises(MetadataError):
            node.look()
        assert node.stop()

    def test_a_node_that_is_told_so_for_exercise_has_itself_replaced(self, node):
        node.items[LIFECYCLE] = "InService"
        (node.folder / "drills/autoscaling").mkdir(parents=True)
        (node.folder / "drills" / LIFECYCLE).write_text("Terminated\n")
        node.look()
        assert (bool(node.stop()), node.group.told) == (True, ["replace"])

    def test_a_scheduled_event_of_a_drill_comes_when_it_is_due(self, node):
        (node.folder / "drills/events/maintenance").mkdir(parents=True)
        (node.folder / "drills" / SCHEDULED).write_text(json.dumps([scheduled(ahead=timedelta(hours=1))]))
        node.look()
        assert node.stop() == ""
        node.now += timedelta(hours=1)
        node.look()
        assert node.stop()


class Sequences(RuleBasedStateMachine):
    """Whatever comes in whichever order, and however often: each notice is reported once, and nobody has more time than told."""

    @initialize()
    def begin(self):
        self.directory = tempfile.TemporaryDirectory()
        self.node = Node(Path(self.directory.name))
        self.kinds, self.left, self.down = set(), [], 0
        ask = self.node.items.get

        def asked(path):
            if self.down:
                self.down -= 1
                raise MetadataError("down")
            return ask(path)

        self.node.watch._service = self.node.watch._drills._ask = asked

    @rule(ahead=st.integers(-60, 150))
    def spot(self, ahead):
        if SPOT not in self.node.items:
            self.node.items[SPOT] = spot(ahead)
            self.left.append(ahead if 0 < ahead < 90 else 90)
            self.kinds.add("spot")

    @rule()
    def terminate(self):
        self.node.items[LIFECYCLE] = "Terminated"
        self.kinds.add("the auto")
        self.left.append(90)

    @rule()
    def rebalance(self):
        self.node.items[REBALANCE] = "{}"
        self.kinds.add("rebalance")

    @rule(ahead=st.integers(1, 80))
    def event(self, ahead):
        if SCHEDULED not in self.node.items:
            self.node.items[SCHEDULED] = json.dumps([scheduled(ahead=timedelta(seconds=ahead))])
            self.kinds.add("scheduled")
            self.left.append(ahead)

    @rule(times=st.integers(1, 4))
    def fail(self, times):
        self.down = times

    @rule()
    def look(self):
        with suppress(MetadataError), self.node.departure.training():
            self.node.look()

    @invariant()
    def each_once(self):
        told = self.node.reported()
        assert len(told) == len(set(told))
        assert self.node.seconds() in (-1.0, *self.left)

    def teardown(self):
        self.down = 0
        with self.node.departure.training():
            self.node.look()
        assert len(self.node.reported()) == len(self.kinds)
        if self.left:
            assert self.node.seconds() <= min(self.left)
        self.node.departure.carry_out()
        assert self.node.group.told.count("replace") == bool({"spot", "scheduled"} & self.kinds)
        self.directory.cleanup()


def test_any_sequence_of_notices():
    run_state_machine_as_test(Sequences, settings=hypothesis_settings(max_examples=25, stateful_step_count=12, deadline=None))


class TestEla09:
    """The whole way from a metadata service that has a bad day."""

    @pytest.fixture
    def service(self, fake_metadata, monkeypatch):
        fake = fake_metadata()
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", fake.endpoint)
        return fake

    FAULTS = (404, 404, 401, 500, 500, "silence", "torn", "dribble", "garbage", "silence", 503, 429, 403)
    NOTICES = (
        (SPOT, spot(now=NOW)),
        (LIFECYCLE, "Terminated"),
        (REBALANCE, '{"noticeTime": "2026-11-30T12:00:00Z"}'),
        (SCHEDULED, json.dumps([scheduled(ahead=timedelta(minutes=5))])),
    )

    @pytest.mark.parametrize(("path", "document"), NOTICES, ids=["spot", "termination", "rebalance", "scheduled"])
    def test_ela_09_errors_do_not_end_the_watch_and_every_kind_of_notice_is_seen(self, service, tmp_path, path, document):
        node = Node(tmp_path, ask=Metadata(timeout=0.2, attempts=1).get)
        service.faults = list(self.FAULTS)
        service.items[path] = document
        failures = []

        def look():
            try:
                node.look()
            except MetadataError as error:
                failures.append(error)
                raise

        deadline = time.monotonic() + 15
        with Periodic("notices", 0.02, look):
            while not node.reported() or service.faults:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        assert failures
        assert len(node.reported()) == 1

    def test_ela_09_a_stall_delays_a_notice_by_no_more_than_the_stall_and_a_look(self, service, tmp_path):
        node = Node(tmp_path, ask=Metadata(timeout=0.2, attempts=1).get)
        service.faults = ["silence"] * 4
        service.items[SPOT] = spot()
        started = time.monotonic()
        with pytest.raises(MetadataError):
            node.look()
        assert time.monotonic() - started < 2.0
        node.look()
        assert node.stop()
