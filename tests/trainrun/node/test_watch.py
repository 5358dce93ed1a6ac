"""What is watched beside the training, and what is left at its end."""

from __future__ import annotations

import json
import threading
import time

import pytest

from trainrun.directory import DirectoryStore
from trainrun.node.finish import Result, finish
from trainrun.node.metric_files import MetricFiles
from trainrun.node.outcome import Outcome
from trainrun.node.periodic import Periodic
from trainrun.spec import ShutdownSpec
from trainrun.store import StoreError


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "run")


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

    def test_the_end_of_this_start_ends_the_run_for_others_whatever_it_was(self, store):
        result = Result(store=store, since=time.time())
        assert result.ended() == ""
        result.write(Outcome(state="failed", reason="It broke."), node="i-2", last_step=None)
        assert result.ended() == "The run has failed, says i-2: It broke."
        result.write(Outcome(state="succeeded", reason="Done."), node="i-2", last_step=None)
        assert result.ended() == "The run has succeeded, says i-2: Done."
        assert Result(store=store, since=time.time() + 60).ended() == ""
