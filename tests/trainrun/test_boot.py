"""The way to the first step, part by part."""

from __future__ import annotations

import json

from trainrun.__main__ import main
from trainrun.boot import boots
from trainrun.directory import DirectoryStore


def put(store, key, *lines):
    store.put(key, ("\n".join(json.dumps(line) for line in lines) + "\n{half").encode())


def event(step, state, time, seconds=0.0):
    return {"node": "i-1", "step": step, "state": state, "time": time, "seconds": seconds, "detail": ""}


def a_boot(store):
    put(
        store,
        "nodes/i-1.jsonl",
        event("bootstrap", "done", 100.0, 1.5),
        event("prepare", "done", 101.0, 1.0),
        event("check", "done", 103.0, 2.0),
        event("meet", "done", 103.5, 0.5),
        event("train", "started", 103.5),
        event("train", "failed", 140.0, 36.5),
        event("meet", "done", 150.0, 10.0),
        event("train", "started", 150.0),
    )
    put(store, "metrics/i-1-1-0.jsonl", {"event": "started", "time": 110.0, "step": 0}, {"step": 1, "loss": 1.0, "time": 112.0})


def test_each_part_has_its_seconds_and_they_add_up(tmp_path, capsys):
    store = DirectoryStore(tmp_path)
    a_boot(store)
    (boot,) = boots(store)
    assert boot.parts == {"bootstrap": 1.5, "prepare": 1.0, "check": 2.0, "meet": 0.5, "start": 6.5, "resume": 2.0}
    assert boot.seconds == 112.0 - 98.5
    assert main(["boot", str(tmp_path), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["node"], told["seconds"]) == ("i-1", 13.5)
    assert main(["boot", str(tmp_path)]) == 0
    assert " ".join(capsys.readouterr().out.splitlines()[1].split()) == "i-1 1.50 1.00 - 2.00 - 0.50 6.50 2.00 13.50"


def test_a_node_that_never_trained_has_not_booted(tmp_path, capsys):
    store = DirectoryStore(tmp_path)
    put(store, "nodes/i-1.jsonl", event("prepare", "done", 1.0), event("train", "started", 2.0))
    assert boots(store) == []
    assert main(["boot", str(tmp_path)]) == 1
    assert "has come to a training step" in capsys.readouterr().err
