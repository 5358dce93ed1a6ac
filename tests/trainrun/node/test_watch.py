"""What is watched beside the training, and what is left at its end."""

from __future__ import annotations

import json
import threading
import time

import pytest

from trainrun.deadline import seconds_in
from trainrun.directory import DirectoryStore
from trainrun.node.events import Events
from trainrun.node.finish import Result, finish
from trainrun.node.metadata import Identity, Metadata, MetadataError
from trainrun.node.metric_files import MetricFiles
from trainrun.node.outcome import Outcome
from trainrun.node.periodic import Periodic
from trainrun.node.watch import Notices
from trainrun.spec import ShutdownSpec
from trainrun.store import StoreError


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "run")


class TestNotices:
    @pytest.fixture
    def service(self, fake_metadata, monkeypatch):
        fake = fake_metadata()
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", fake.endpoint)
        return fake

    @pytest.fixture
    def notices(self, service, store, tmp_path):
        events = Events(identity=Identity(node="i-1", address="10.0.0.7"), path=tmp_path / "events", store=store)
        metadata = Metadata(timeout=0.3, attempts=2, pause=0.01)
        return Notices(metadata=metadata, stop_file=tmp_path / "stop", stop_grace=90, events=events)

    def reported(self, tmp_path):
        path = tmp_path / "events"
        return [json.loads(line)["detail"] for line in path.read_text().splitlines()] if path.exists() else []

    def test_no_notice_does_nothing(self, notices, tmp_path):
        notices.look()
        assert not (tmp_path / "stop").exists()
        assert self.reported(tmp_path) == []

    def test_a_spot_notice_asks_all_ranks_to_stop_once(self, service, notices, tmp_path):
        service.items["spot/instance-action"] = '{"action": "terminate", "time": "2026-11-30T12:00:00Z"}'
        notices.look()
        notices.look()
        text = (tmp_path / "stop").read_text()
        assert text == "90 seconds left; spot interruption notice: terminate at 2026-11-30T12:00:00Z\n"
        assert seconds_in(text, otherwise=1.0) == 90.0
        assert len(self.reported(tmp_path)) == 1

    @pytest.mark.parametrize(("ahead", "told"), [(40, range(35, 41)), (120, [90]), (-40, [90])])
    def test_the_ranks_are_told_how_long_they_have(self, service, notices, tmp_path, ahead, told):
        """The notice's time, if the agent would not end them before. One in the past is a clock that is wrong."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + ahead))
        service.items["spot/instance-action"] = json.dumps({"action": "terminate", "time": moment})
        notices.look()
        assert int(seconds_in((tmp_path / "stop").read_text(), otherwise=1.0)) in told

    def test_a_notice_that_cannot_be_read_is_a_notice(self, service, notices, tmp_path):
        service.items["spot/instance-action"] = "terminate!"
        notices.look()
        assert (tmp_path / "stop").read_text() == "90 seconds left; spot interruption notice: terminate!\n"

    def test_a_rebalance_recommendation_is_reported_and_stops_nothing(self, service, notices, tmp_path):
        service.items["events/recommendations/rebalance"] = '{"noticeTime": "2026-11-30T12:00:00Z"}'
        notices.look()
        notices.look()
        assert len(self.reported(tmp_path)) == 1
        assert not (tmp_path / "stop").exists()

    def test_ela_09_errors_do_not_end_the_watch_and_the_notice_is_seen(self, service, notices, tmp_path):
        service.faults = [404, 404, 401, 500, 500, "silence", "silence", 503]
        service.items["spot/instance-action"] = '{"action": "stop", "time": "2026-11-30T12:00:00Z"}'
        failures = []

        def look():
            try:
                notices.look()
            except MetadataError as error:
                failures.append(error)
                raise

        deadline = time.monotonic() + 10
        with Periodic("notices", 0.02, look):
            while not (tmp_path / "stop").exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
        assert failures
        assert service.faults == []


class TestPeriodic:
    def test_it_goes_on_after_an_exception_and_ends_with_its_block(self):
        calls, enough = [], threading.Event()

        def call():
            calls.append(1)
            if len(calls) >= 3:
                enough.set()
            raise ValueError("once more")

        with Periodic("test", 0.01, call):
            assert enough.wait(5)
        time.sleep(0.05)
        ended_at = len(calls)
        time.sleep(0.05)
        assert len(calls) == ended_at


class TestMetricFiles:
    @pytest.fixture
    def folder(self, tmp_path):
        folder = tmp_path / "metrics"
        folder.mkdir()
        return folder

    def test_files_are_sent_when_they_have_grown(self, folder, store, monkeypatch):
        files = MetricFiles(folder=folder, store=store, node="i-1")
        (folder / "1-00001.jsonl").write_text("one\n")
        (folder / "1-00002.jsonl").write_text("two\n")
        files.send()
        (folder / "1-00002.jsonl").write_text("two\nthree\n")
        puts = []
        put = DirectoryStore.put
        monkeypatch.setattr(DirectoryStore, "put", lambda self, key, data: (puts.append(key), put(self, key, data)))
        files.send()
        assert puts == ["i-1-1-00002.jsonl"]
        assert store.get("metrics/i-1-1-00002.jsonl") == b"two\nthree\n"

    def test_the_last_step_is_this_nodes_or_else_anyones(self, folder, store):
        files = MetricFiles(folder=folder, store=store, node="i-1")
        assert files.last_step() is None
        store.put("metrics/i-2-1-00001.jsonl", b'{"step": 7, "steps": 9}\n{"step": 8, "event": "committed"}\n')
        assert files.last_step() == (7, 9)
        (folder / "1-00001.jsonl").write_text('{"step": 8, "steps": 9}\n{"step": 9, "st')
        assert files.last_step() == (8, 9)


class TestFinish:
    class FakeGroup:
        def __init__(self, store):
            self._store, self.result_when_scaled = store, None

        def scale_to_zero(self):
            self.result_when_scaled = json.loads(self._store.get("result.json"))

    def finish(self, state, store, tmp_path, **shutdown):
        group = self.FakeGroup(store)
        text = finish(
            Outcome(state=state, reason="because"),
            node="i-1",
            shutdown=ShutdownSpec(**shutdown),
            result=Result(store=store, since=0.0),
            metric_files=MetricFiles(folder=tmp_path, store=store, node="i-1"),
            group=group,
        )
        return text, group.result_when_scaled

    def test_success_is_durable_before_the_group_goes(self, store, tmp_path):
        (tmp_path / "1-00001.jsonl").write_text('{"step": 9, "steps": 9}\n')
        text, result = self.finish("succeeded", store, tmp_path)
        assert text == "succeeded; the group is scaled to zero"
        assert (result["state"], result["step"], result["steps"], result["node"]) == ("succeeded", 9, 9, "i-1")
        assert (result["reason"], set(result)) == ("because", {"state", "step", "steps", "time", "reason", "node"})

    def test_a_failure_keeps_the_group_unless_told_otherwise(self, store, tmp_path):
        text, scaled = self.finish("failed", store, tmp_path)
        assert (text, scaled) == ("failed; the group is kept", None)
        _, scaled = self.finish("failed", store, tmp_path, on_failure="scale_to_zero")
        assert scaled["state"] == "failed"

    def test_a_store_that_fails_for_a_while_is_waited_for(self, store, tmp_path, monkeypatch):
        monkeypatch.setattr("trainrun.node.finish.time.sleep", lambda _: None)
        put, failures = DirectoryStore.put, [StoreError("not yet")] * 3

        def put_later(self, key, data):
            if failures:
                raise failures.pop()
            put(self, key, data)

        monkeypatch.setattr(DirectoryStore, "put", put_later)
        assert self.finish("succeeded", store, tmp_path)[1]["state"] == "succeeded"

    def test_only_a_success_of_this_start_ends_the_run_for_others(self, store):
        result = Result(store=store, since=time.time())
        assert result.ended() == ""
        result.write(Outcome(state="failed", reason="x"), node="i-2", last_step=None)
        assert result.ended() == ""
        result.write(Outcome(state="succeeded", reason="x"), node="i-2", last_step=None)
        assert result.ended() == "The run has succeeded without this node, says i-2."
        assert Result(store=store, since=time.time() + 60).ended() == ""
