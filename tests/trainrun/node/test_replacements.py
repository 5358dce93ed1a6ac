"""Unfit nodes are replaced, but only so many."""

from __future__ import annotations

import json
import os

import pytest
from botocore.exceptions import ClientError

from trainrun.directory import DirectoryStore
from trainrun.node import replacements
from trainrun.node.outcome import DO_NOT_RESTART
from trainrun.node.places import Places
from trainrun.node.replacements import WINDOW_SECONDS, Replacements, replace_or_end
from trainrun.store import StoreError


class Group:
    """Remembers what it is asked, after as many failures."""

    def __init__(self, failures=0, code="Throttling"):
        self.code = code
        self.failures = failures
        self.asked = []

    def replace_me(self, reason):
        if self.failures:
            self.failures -= 1
            answer = {"Error": {"Code": self.code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": 400}}
            raise ClientError(answer, "SetInstanceHealth")
        self.asked.append(reason)


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "run")


@pytest.fixture
def unfit(store, tmp_path):
    """unfit(node): what becomes of a node that fails; its group keeps what it was asked."""
    group = Group()

    def end(node, *, allowed=2, store=store, group=group, reason="no GPUs"):
        budget = Replacements(store=store, allowed=allowed)
        return replace_or_end(reason, node=node, replacements=budget, group=group, places=Places(root=tmp_path))

    end.group = group
    return end


def test_so_many_are_replaced_and_the_next_ends_the_run_with_the_last_reasons(unfit, store):
    assert unfit("i-1", reason="torch: none") is None
    assert unfit("i-2", reason="disk: full") is None
    assert unfit.group.asked == ["torch: none", "disk: full"]
    outcome = unfit("i-3", reason="disk: full again")
    assert outcome.state == "failed"
    assert "3 nodes in 24 hours did not pass their checks, and 2 may be replaced (shutdown.max_replacements)" in outcome.reason
    assert "i-1: torch: none\ni-2: disk: full\ni-3: disk: full again" in outcome.reason
    assert len(unfit.group.asked) == 2
    assert json.loads(store.get("replacements/i-2.json"))["reason"] == "disk: full"


def test_a_node_that_fails_again_after_a_restart_counts_once(unfit):
    assert [unfit("i-1", allowed=1) for _ in range(3)] == [None, None, None]


def test_none_allowed_ends_at_once(unfit):
    assert unfit("i-1", allowed=0).state == "failed" and not unfit.group.asked


def test_a_day_later_the_budget_is_whole_again(unfit, store, tmp_path):
    unfit("i-1", allowed=1)
    old = (tmp_path / "run/replacements/i-1.json").stat().st_mtime - WINDOW_SECONDS - 1
    os.utime(tmp_path / "run/replacements/i-1.json", (old, old))
    assert unfit("i-2", allowed=1) is None


def test_a_clock_that_is_off_changes_nothing(unfit, monkeypatch):
    unfit("i-1", allowed=1)
    monkeypatch.setattr(replacements.time, "time", lambda: 0.0)
    assert unfit("i-2", allowed=1).state == "failed"


def test_a_group_that_does_not_answer_is_asked_again(unfit, monkeypatch):
    monkeypatch.setattr(replacements.time, "sleep", lambda _: None)
    group = Group(failures=2)
    assert unfit("i-1", group=group) is None
    assert group.asked == ["no GPUs"]


def test_a_group_that_never_answers_leaves_the_node_with_word_on_its_console(unfit, monkeypatch, tmp_path):
    monkeypatch.setattr(replacements, "REQUEST_SECONDS", -1.0)
    monkeypatch.setattr(replacements, "has_own_kernel", lambda _: True)
    monkeypatch.setattr(replacements, "CONSOLE", tmp_path / "console")
    assert unfit("i-1", group=Group(failures=9)) is None
    assert "i-1 is not fit and stays, because its group does not hear it" in (tmp_path / "console").read_text()


@pytest.mark.parametrize("code", ["AccessDenied", "ValidationError"])
def test_a_refusal_for_good_is_not_asked_again(code, unfit, caplog):
    group = Group(failures=1, code=code)
    assert unfit("i-1", group=group) is None
    assert not group.asked and f"({code})" in caplog.text


def test_a_node_that_cannot_be_counted_stays_and_is_not_replaced(unfit, monkeypatch, tmp_path):
    class Lost(DirectoryStore):
        def put(self, *_, **__):
            raise StoreError("no way to S3")

        def child(self, prefix):
            return self

    monkeypatch.setattr(replacements, "has_own_kernel", lambda _: True)
    monkeypatch.setattr(replacements, "CONSOLE", tmp_path / "console")
    assert unfit("i-1", store=Lost(tmp_path / "run")) is None
    assert not unfit.group.asked
    assert "it cannot count itself: no way to S3\nno GPUs" in (tmp_path / "console").read_text()


def test_nodes_without_torch_are_replaced_until_the_budget_is_spent(start_cluster, group):
    """The whole way, with the agents of two nodes in a group of an emulated AWS."""
    without_torch = {"python": "/nonexistent/python"}
    cluster = start_cluster(job=without_torch, shutdown={"max_replacements": 2})

    def unhealthy():
        return {i["InstanceId"] for i in group.describe()["Instances"] if i["HealthStatus"] == "Unhealthy"}

    first = group.instances()
    cluster.wait("both are unhealthy", lambda: unhealthy() == set(first), seconds=60)
    (event,) = [e for e in cluster.nodes[first[0]].events() if e["state"] == "failed"]
    assert event["step"] == "check" and "/nonexistent/python cannot be run" in event["detail"]
    third = cluster.boot(group.lose(first[0]))
    cluster.wait("the run has ended", lambda: bool(cluster.objects("result.json")), seconds=60)
    result = json.loads(cluster.objects("result.json")["result.json"])
    assert result["state"] == "failed"
    assert "3 nodes in 24 hours did not pass their checks, and 2 may be replaced" in result["reason"]
    assert "/nonexistent/python cannot be run" in result["reason"]
    assert third.instance not in unhealthy()
    assert sorted(cluster.objects("replacements/")) == sorted(f"replacements/{node}.json" for node in (*first, third.instance))
    assert cluster.nodes[first[1]].process.wait(timeout=20) == DO_NOT_RESTART
