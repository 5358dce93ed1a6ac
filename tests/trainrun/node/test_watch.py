"""What is watched beside the training, and what is left at its end."""

from __future__ import annotations

import threading
import time

import pytest

from trainrun.directory import DirectoryStore
from trainrun.node.metric_files import MetricFiles
from trainrun.node.periodic import Periodic


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
