"""Unfit nodes are replaced, but only so many."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError

from trainrun.directory import DirectoryStore
from trainrun.node import agent, replacements
from trainrun.node.checks.runner import Checked, ChecksFailed
from trainrun.node.outcome import AGAIN, DO_NOT_RESTART, StepFailed
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
    assert unfit("i-1", reason="torch: none") == DO_NOT_RESTART
    assert unfit("i-2", reason="disk: full") == DO_NOT_RESTART
    assert unfit.group.asked == ["torch: none", "disk: full"]
    outcome = unfit("i-3", reason="disk: full again")
    assert outcome.state == "failed"
    assert "3 nodes in 24 hours did not pass their checks, and 2 may be replaced (shutdown.max_replacements)" in outcome.reason
    assert "i-1: torch: none\ni-2: disk: full\ni-3: disk: full again" in outcome.reason
    assert len(unfit.group.asked) == 2
    assert json.loads(store.get("replacements/i-2.json"))["reason"] == "disk: full"


def test_a_node_that_fails_again_after_a_restart_counts_once(unfit):
    assert [unfit("i-1", allowed=1) for _ in range(3)] == 3 * [DO_NOT_RESTART]


def test_none_allowed_ends_at_once(unfit):
    assert unfit("i-1", allowed=0).state == "failed" and not unfit.group.asked


def test_a_day_later_the_budget_is_whole_again(unfit, store, tmp_path):
    unfit("i-1", allowed=1)
    old = (tmp_path / "run/replacements/i-1.json").stat().st_mtime - WINDOW_SECONDS - 1
    os.utime(tmp_path / "run/replacements/i-1.json", (old, old))
    assert unfit("i-2", allowed=1) == DO_NOT_RESTART


def test_a_clock_that_is_off_changes_nothing(unfit, monkeypatch):
    unfit("i-1", allowed=1)
    monkeypatch.setattr(replacements.time, "time", lambda: 0.0)
    assert unfit("i-2", allowed=1).state == "failed"


def test_a_group_that_does_not_answer_is_asked_again(unfit, monkeypatch):
    monkeypatch.setattr(replacements.time, "sleep", lambda _: None)
    group = Group(failures=2)
    assert unfit("i-1", group=group) == DO_NOT_RESTART
    assert group.asked == ["no GPUs"]


def test_a_group_that_never_answers_leaves_the_node_with_word_on_its_console(unfit, monkeypatch, tmp_path):
    monkeypatch.setattr(replacements, "REQUEST_SECONDS", -1.0)
    monkeypatch.setattr(replacements, "has_own_kernel", lambda _: True)
    monkeypatch.setattr(replacements, "CONSOLE", tmp_path / "console")
    assert unfit("i-1", group=Group(failures=9)) == DO_NOT_RESTART
    assert "i-1 is not fit and stays, because its group does not hear it" in (tmp_path / "console").read_text()


@pytest.mark.parametrize("code", ["AccessDenied", "ValidationError"])
def test_a_refusal_for_good_is_not_asked_again(code, unfit, caplog):
    group = Group(failures=1, code=code)
    assert unfit("i-1", group=group) == DO_NOT_RESTART
    assert not group.asked and f"({code})" in caplog.text


class Away(DirectoryStore):
    """Does not answer so many times."""

    failures = 0

    def put(self, *arguments, **named):
        if self.failures:
            self.failures -= 1
            raise StoreError("no way to S3")
        super().put(*arguments, **named)

    def child(self, prefix):
        return self


def test_a_node_that_cannot_be_counted_is_not_replaced_but_looked_at_anew(unfit, monkeypatch, tmp_path):
    monkeypatch.setattr(replacements, "has_own_kernel", lambda _: True)
    monkeypatch.setattr(replacements, "CONSOLE", tmp_path / "console")
    monkeypatch.setattr(replacements, "COUNT_SECONDS", -1.0)
    store = Away(tmp_path / "run")
    store.failures = 9
    assert unfit("i-1", store=store) == AGAIN
    assert not unfit.group.asked
    assert "it cannot count itself: no way to S3\nno GPUs" in (tmp_path / "console").read_text()


def test_a_store_that_comes_back_is_waited_for_with_growing_pauses(unfit, monkeypatch, tmp_path):
    pauses = []
    monkeypatch.setattr(replacements.time, "sleep", pauses.append)
    store = Away(tmp_path / "run")
    store.failures = 6
    assert unfit("i-1", store=store) == DO_NOT_RESTART
    assert unfit.group.asked == ["no GPUs"]
    assert pauses == [5, 10, 20, 40, 60, 60]


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (ChecksFailed([Checked(name="store", seconds=60, fault="no way to S3"), Checked(name="torch", seconds=1)]), AGAIN),
        (ChecksFailed([Checked(name=name, seconds=60, fault="none") for name in ("torch", "store")]), DO_NOT_RESTART),
        (StepFailed("no disk"), DO_NOT_RESTART),
    ],
)
def test_only_a_store_that_is_away_makes_no_unfit_node(failure, code, monkeypatch, tmp_path):
    """Whether so many as may be replaced, or more, miss it at once: none of them is counted, and each is started anew."""
    told = []
    monkeypatch.setattr(agent, "tell_console", lambda text, **_: told.append(text))
    monkeypatch.setattr(agent, "replace_or_end", lambda *_, **__: DO_NOT_RESTART)
    node = SimpleNamespace(
        readiness=SimpleNamespace(is_awaited=False),
        identity=SimpleNamespace(node="i-1"),
        places=Places(root=tmp_path),
        store=DirectoryStore(tmp_path / "run"),
        spec=SimpleNamespace(shutdown=SimpleNamespace(max_replacements=0)),
        group=None,
    )
    assert agent.Agent.unfit(node, failure) == code
    assert ["waits for the run's folder. store: no way to S3" in text for text in told] == ([True] if code == AGAIN else [])


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
