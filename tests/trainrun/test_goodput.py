"""Where a run's time went, on histories that are made up."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainrun.__main__ import main
from trainrun.goodput import CAUSES, account, of
from trainrun.store import open_store


def event(time, step, state, *, node="i-a", detail=""):
    return {"time": time, "node": node, "step": step, "state": state, "detail": detail}


def launch(source, begin, first, last, *, pace=1.0, wait=0.0, name="started", ends=False):
    """A launch that logs each step, of which the first takes 5 s more."""
    lines = [{"time": begin, "step": first, "event": name}]
    for number, step in enumerate(range(first + 1, last + 1), start=1):
        time = begin + 5.0 + pace * number
        seconds = pace + 5.0 * (number == 1)
        lines.append({"time": time, "step": step, "seconds_per_step": seconds, "data_wait": wait})
    if ends:
        lines.append({"time": lines[-1]["time"] + 1.0, "step": last, "event": "finished"})
    return [{**line, "source": source} for line in lines]


def booted(*, node="i-a", at=0.0):
    return [
        event(at, "prepare", "started", node=node),
        event(at + 30.0, "check", "done", node=node),
        event(at + 30.0, "meet", "started", node=node),
        event(at + 50.0, "meet", "done", node=node),
        event(at + 50.0, "train", "started", node=node),
    ]


def spent(found):
    return {cause: round(seconds, 3) for cause, seconds in found.seconds.items() if seconds}


def test_a_run_without_losses():
    metrics = launch("a", 60.0, 0, 100, wait=0.25, ends=True)
    metrics.append({"time": 100.0, "step": 20, "event": "committed", "stall_seconds": 0.5, "source": "a"})
    found = account([*booted(), event(167.0, "train", "done", detail="the job is done"), event(170.0, "finish", "done")], metrics)
    assert spent(found) == {
        "boot": 30.0,
        "waiting_for_nodes": 20.0,
        "starting": 15.0,  # of the launch 10, and of its first step 5
        "data_wait": 25.0,
        "checkpoint_stall": 0.5,
        "productive": 74.5,
        "ending": 5.0,
    }
    assert (found.steps, found.repeated_steps, found.restarts) == (100, 0, 0)
    assert found.goodput == pytest.approx(74.5 / 170.0)
    assert found.node_hours == pytest.approx(170.0 / 3600)


@pytest.mark.parametrize(
    ("happened", "cause"),
    [
        ([event(96.0, "train", "failed", detail="torchrun ended with exit code 1")], "crash"),
        ([event(96.0, "train", "failed", detail="Rank 1 made no progress for 9 s")], "hang"),
        ([event(96.0, "train", "failed", detail="The ranks saved and left (exit code 75)")], "notice"),
        ([event(96.0, "train", "done", node="i-b", detail="Asked to stop by x"), event(96.5, "meet", "started")], "notice"),
        ([event(96.0, "train", "failed", detail="torchrun ended with exit code 1")], "node_loss"),
        ([event(96.0, "prepare", "started")], "agent_crash"),
        ([event(96.0, "train", "failed", node="i-b"), event(96.0, "check", "failed", node="i-b")], "failed_check"),
        ([], "unknown"),
    ],
)
def test_a_restart_has_its_cause_and_what_was_lost_is_taken_again(happened, cause):
    other = [event(line["time"], line["step"], line["state"], node="i-b") for line in booted()]
    again = [event(98.0, "train", "started"), *([] if cause == "node_loss" else [event(98.0, "train", "started", node="i-b")])]
    metrics = launch("a", 60.0, 0, 30) + launch("b", 105.0, 20, 40, name="resumed", ends=True)
    found = account([*booted(), *other, *happened, *again], metrics)
    assert found.seconds[f"restart_after_{cause}"] == pytest.approx(15.0, abs=2.0)  # 10 between the launches, 5 of the first step
    assert (found.steps, found.repeated_steps, found.restarts) == (40, 10, 1)
    assert (found.seconds["productive"], found.seconds["repeated"]) == (40.0, 10.0)


def test_survivors_that_are_too_few_wait_for_nodes():
    """A node is lost for good; the other waits 600 s for its replacement."""
    gone = [event(line["time"], line["step"], line["state"], node="i-b") for line in booted()]
    waits = [
        event(97.0, "train", "failed", detail="torchrun ended with exit code 1"),
        event(97.0, "meet", "started"),
        event(400.0, "prepare", "started", node="i-c"),
        event(697.0, "meet", "done"),
        event(697.0, "train", "started"),
    ]
    metrics = launch("a", 60.0, 0, 30) + launch("b", 705.0, 30, 40, name="resumed")
    found = account([*booted(), *gone, *waits], metrics, alive={"i-a": 720.0, "i-b": 95.0, "i-c": 720.0})
    assert found.seconds["waiting_for_nodes"] == 620.0
    assert found.seconds["restart_after_node_loss"] == 2.0 + 8.0 + 5.0
    assert found.node_hours * 3600 == pytest.approx(720.0 + 95.0 + 320.0)


def test_ranks_that_tell_nothing_are_untold():
    found = account([*booted(), event(150.0, "train", "done", detail="the job is done")], [])
    assert spent(found) == {"boot": 30.0, "waiting_for_nodes": 20.0, "untold": 100.0}
    assert found.goodput is None


MOMENTS = st.floats(0.0, 1000.0)
EVENTS = st.builds(
    event,
    MOMENTS,
    st.sampled_from(["prepare", "check", "meet", "train", "watch", "finish"]),
    st.sampled_from(["started", "done", "failed"]),
    node=st.sampled_from(["i-a", "i-b", "i-c"]),
    detail=st.sampled_from(["", "ended with exit code 1", "made no progress", "Asked to stop", "rendezvous host"]),
)
LINES = st.fixed_dictionaries(
    {"time": MOMENTS, "step": st.integers(0, 50), "source": st.sampled_from(["a", "b", "c"])},
    optional={
        "event": st.sampled_from(["started", "resumed", "committed", "finished"]),
        "seconds_per_step": st.floats(0.0, 50.0),
        "data_wait": st.floats(0.0, 1.5),
        "stall_seconds": st.floats(0.0, 500.0),
    },
)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, min_size=1, max_size=30), st.lists(LINES, max_size=40))
def test_whatever_happened_the_causes_add_up_to_the_wall_time(events, metrics):
    found = account(events, metrics)
    assert sum(found.seconds.values()) == pytest.approx(found.wall_seconds, abs=1e-6)
    assert all(seconds >= 0.0 for seconds in found.seconds.values())
    assert set(found.seconds) == set(CAUSES)
    assert found.repeated_steps >= 0 and 0.0 <= (found.goodput or 0.0) <= 1.0
    assert 0.0 <= found.node_hours * 3600 <= 3 * found.wall_seconds + 1e-6


def test_the_command_reads_the_last_start_from_the_runs_folder(tmp_path, capsys):
    store = open_store(str(tmp_path))
    assert of(store) is None
    assert main(["goodput", str(tmp_path)]) == 1
    assert "No node has reported" in capsys.readouterr().err

    before = [event(-900.0 + 1e6, "prepare", "started"), event(-800.0 + 1e6, "finish", "done")]
    events = [{**line, "time": line["time"] + 1e6} for line in booted()]
    store.put("nodes/i-a.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in [*before, *events]) + b'{"torn')
    store.put("ends/000001.json", json.dumps({"time": 1e6 - 800.0}).encode())
    lines = [{**line, "time": line["time"] + 1e6} for line in launch("", 60.0, 0, 10, ends=True)]
    for number, part in enumerate((lines[:6], lines[6:])):
        store.put(f"metrics/i-a-1000060000-{number:05}.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in part))
    assert main(["goodput", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["seconds"] == {"boot": 30.0, "waiting_for_nodes": 20.0, "starting": 15.0, "productive": 10.0, "ending": 1.0}
    assert (told["steps"], told["restarts"], told["wall_seconds"]) == (10, 0, 76.0)
    assert main(["goodput", str(tmp_path)]) == 0
    assert "goodput 13.2%; 10 steps" in capsys.readouterr().out
