"""Event lines, and their way to the store."""

from __future__ import annotations

import json
import threading

import pytest

from trainrun.directory import DirectoryStore
from trainrun.node.events import Events
from trainrun.node.log_stream import LogStream
from trainrun.node.metadata import Identity
from trainrun.node.outcome import Leave, StepFailed
from trainrun.store import StoreError

IDENTITY = Identity(node="i-0123", address="10.0.0.7")


class FailingStore(DirectoryStore):
    """Fails until it is told to work."""

    def __init__(self, directory):
        super().__init__(directory)
        self.works = threading.Event()
        self.tried = threading.Event()

    def put(self, key, data, *, deadline=None):
        self.tried.set()
        if not self.works.is_set():
            raise StoreError("no way to S3")
        super().put(key, data, deadline=deadline)


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "run")


def lines_of(store):
    return [json.loads(line) for line in store.get("nodes/i-0123.jsonl").splitlines()]


def test_each_step_is_started_and_done(tmp_path, store):
    path = tmp_path / "events.jsonl"
    with Events(identity=IDENTITY, path=path, store=store) as events, events.step("prepare") as report:
        report.detail = "folders"
    started, done = lines_of(store)
    assert set(started) == {"time", "node", "address", "step", "state", "seconds", "detail"}
    assert (started["node"], started["address"]) == ("i-0123", "10.0.0.7")
    assert (started["step"], started["state"]) == ("prepare", "started")
    assert (done["step"], done["state"], done["detail"]) == ("prepare", "done", "folders")
    assert 0 <= done["seconds"] < 5
    assert path.read_bytes() == store.get("nodes/i-0123.jsonl")


def test_a_disk_that_is_full_keeps_no_event_from_the_store(tmp_path, store, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with Events(identity=IDENTITY, path=tmp_path / "e", store=store) as events:
        monkeypatch.setattr("trainrun.node.events.write_whole", full)
        events.report("watch", "done", detail="heard")
    assert [line["detail"] for line in lines_of(store)] == ["heard"]


def test_an_agent_that_starts_again_goes_on_with_its_events(tmp_path, store):
    for detail in ("first", "second"):
        with Events(identity=IDENTITY, path=tmp_path / "e", store=store) as events:
            events.report("watch", "done", detail=detail)
    assert [line["detail"] for line in lines_of(store)] == ["first", "second"]


def test_a_failed_step_says_why_and_goes_on_failing(tmp_path, store):
    with Events(identity=IDENTITY, path=tmp_path / "e", store=store) as events:
        with pytest.raises(StepFailed), events.step("check"):
            raise StepFailed("7 of 8 accelerators")
        with pytest.raises(ZeroDivisionError), events.step("check"):
            _ = 1 / 0
    assert [(line["state"], line["detail"]) for line in lines_of(store)] == [
        ("started", ""),
        ("failed", "7 of 8 accelerators"),
        ("started", ""),
        ("failed", "division by zero"),
    ]


def test_to_be_let_go_is_no_failure(tmp_path, store):
    with Events(identity=IDENTITY, path=tmp_path / "e", store=store) as events, pytest.raises(Leave), events.step("train"):
        raise Leave("scale-in")
    assert [(line["state"], line["detail"]) for line in lines_of(store)] == [("started", ""), ("done", "scale-in")]


def test_a_failing_store_stops_nobody_and_gets_all_later(tmp_path, monkeypatch):
    monkeypatch.setattr("trainrun.node.events.RETRY_SECONDS", 0.05)
    store = FailingStore(tmp_path / "run")
    with Events(identity=IDENTITY, path=tmp_path / "e", store=store) as events:
        with events.step("prepare"):
            pass
        assert store.tried.wait(5)
        store.works.set()
        with events.step("check"):
            pass
    assert [line["step"] for line in lines_of(store)] == ["prepare", "prepare", "check", "check"]


def test_a_store_that_never_works_does_not_hold_up_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("trainrun.node.events.RETRY_SECONDS", 0.05)
    with Events(identity=IDENTITY, path=tmp_path / "e", store=FailingStore(tmp_path / "run")) as events:
        events.report("finish", "done")
    assert json.loads((tmp_path / "e").read_text())["step"] == "finish"


def test_new_lines_go_to_the_log_stream_of_the_node(tmp_path, store, aws):
    logs = aws.client("logs")
    group = f"cluster-{aws.bucket}"
    logs.create_log_group(logGroupName=group)
    for _ in range(2):  # the agent is started again
        stream = LogStream(group=group, name="i-0123/events", region="us-east-1")
        with Events(identity=IDENTITY, path=tmp_path / "e", store=store, stream=stream) as events, events.step("prepare"):
            pass
    found = logs.get_log_events(logGroupName=group, logStreamName="i-0123/events", startFromHead=True)["events"]
    assert [json.loads(event["message"])["state"] for event in found] == ["started", "done"] * 2


def test_a_log_group_that_is_not_there_stops_nobody(tmp_path, store, aws):
    stream = LogStream(group=f"none-{aws.bucket}", name="i-0123/events", region="us-east-1")
    with Events(identity=IDENTITY, path=tmp_path / "e", store=store, stream=stream) as events, events.step("prepare"):
        pass
    assert [line["state"] for line in lines_of(store)] == ["started", "done"]
