"""A store that harms requests, of one rank or of all: what passes is survived, and about what does not all ranks agree in time,
naming rank and key, and training goes on."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fault_store import FaultStore

from trainrun.checkpoint.damage import find_damage
from trainrun.checkpoint.layout import committed_steps, read_commit
from trainrun.store import open_store

WORLD = 2
SECONDS = 1.0
"""That a save may take which is to fail."""
PATIENCE = 15.0
"""Seconds beyond, on a busy machine."""

ONE, ALL, COMMIT = r"PUT .*rank-00001\.bin", r"PUT .*rank-0000.\.bin", r"PUT .*COMMIT"
READ_ONE, READ_ALL = r"GET .*rank-00001\.bin", r"GET .*rank-0000.\.bin"
EXPIRED = {"kind": "answer", "status": 400, "code": "ExpiredToken"}

PASSING: dict[str, Any] = {
    "delay": {"kind": "delay", "seconds": 0.3},
    "drop": {"kind": "drop", "after": 50, "times": 1},
    "lost": {"kind": "lose", "times": 1},
    "busy": {"kind": "answer", "times": 2},
    "corrupt": {"kind": "corrupt", "after": 70, "times": 1},
}
SURVIVED = {
    **{f"{name}, one": [{"pattern": ONE, **fault}] for name, fault in PASSING.items()},
    **{f"{name}, all": [{"pattern": ALL, **fault}] for name, fault in PASSING.items()},
    **{f"{name}, commit": [{"pattern": COMMIT, **fault}] for name, fault in PASSING.items()},
    "description is cut off": [{"pattern": r"GET .*rank-00001\.json", "kind": "truncate", "after": 100, "times": 1}],
    "description is corrupt": [{"pattern": r"GET .*rank-00001\.json", "kind": "corrupt answer", "after": 100, "times": 1}],
}
"""Saves that are committed all the same."""

FAILED: dict[str, tuple[str, Any, list[str]]] = {
    "silent, one": (ONE, {"kind": "silence"}, ["rank 1: .*rank-00001.bin"]),
    "silent, all": (ALL, {"kind": "silence"}, ["rank 0: .*rank-00000.bin", "rank 1: .*rank-00001.bin"]),
    "ever busy, one": (ONE, {"kind": "answer"}, ["rank 1: .*rank-00001.bin"]),
    "dropped, all": (ALL, {"kind": "drop", "after": 50}, ["rank 0: .*rank-00000.bin", "rank 1: .*rank-00001.bin"]),
    "ever corrupt, one": (ONE, {"kind": "corrupt", "after": 70}, ["rank 1: .*rank-00001.bin"]),
    "expired, one": (ONE, EXPIRED, ["rank 1: .*rank-00001.bin.*ExpiredToken.*nothing renews them"]),
    "expired, all": (ALL, EXPIRED, ["rank 0: .*rank-00000.bin.*ExpiredToken", "rank 1: .*rank-00001.bin.*ExpiredToken"]),
    "silent description": (r"PUT .*rank-00001\.json", {"kind": "silence"}, ["rank 1: .*rank-00001.json"]),
    "silent commit": (COMMIT, {"kind": "silence"}, ["rank 0: .*COMMIT.json"]),
    "expired commit": (COMMIT, EXPIRED, ["rank 0: .*COMMIT.json.*ExpiredToken"]),
}
"""Saves that fail: the request, what befalls it, and what is said."""

READ_PASSING: dict[str, Any] = {
    "delay": {"kind": "delay", "seconds": 0.3},
    "drop": {"kind": "drop", "times": 1},
    "busy": {"kind": "answer", "times": 2},
    "cut off": {"kind": "truncate", "after": 100, "times": 2},
    "corrupt": {"kind": "corrupt answer", "after": 10, "times": 1},
}
READ = {
    **{f"{name}, one": [{"pattern": READ_ONE, **fault}] for name, fault in READ_PASSING.items()},
    **{f"{name}, all": [{"pattern": READ_ALL, **fault}] for name, fault in READ_PASSING.items()},
}
"""Restores that succeed all the same."""

UNREAD: dict[str, Any] = {
    "silent": {"kind": "silence"},
    "busy": {"kind": "answer"},
    "dropped": {"kind": "drop"},
    "expired": EXPIRED,
    "cut off": {"kind": "truncate", "after": 0},
}
"""Restores that fail."""


@pytest.mark.slow
def test_ckpt_12_ckpt_13_all_ranks_agree_on_what_became_of_a_harmed_save_or_restore_in_time(
    ranks: Any, faults: FaultStore, tiny: list[str], dataset: str, bucket: str
) -> None:
    arguments = [*tiny, "--strategy=fsdp2", f"--data={dataset}", f"--checkpoint.location=s3://{bucket}", "--steps=100000"]
    arguments += ["--checkpoint.every_steps=1", "--checkpoint.most_failures=1000", "--log_every=1000000", "--checkpoint.keep=100"]
    failing = {name: [{"pattern": pattern, **fault}] for name, (pattern, fault, _) in FAILED.items()}
    at_once = {name: case for name, case in failing.items() if name.startswith("expired")}
    in_the_end = {name: case for name, case in failing.items() if name not in at_once}
    outcomes = ranks(
        "troubled",
        world=WORLD,
        longest=280.0,
        saves=[
            {"arguments": [*arguments, "--checkpoint.timeout_seconds=60"], "cases": SURVIVED},
            {"arguments": [*arguments, f"--checkpoint.timeout_seconds={SECONDS}"], "cases": in_the_end},
            {"arguments": [*arguments, "--checkpoint.timeout_seconds=60"], "cases": {**at_once, "healed": []}},
        ],
        restores={
            **{f"read: {name}": {"arguments": arguments, "case": case, "impatient": False} for name, case in READ.items()},
            **{
                f"unread: {name}, {who}": {"arguments": arguments, "case": [{"pattern": p, **fault}], "impatient": True}
                for name, fault in UNREAD.items()
                for who, p in (("one", READ_ONE), ("all", READ_ALL))
            },
        },
    )
    assert [outcome.code for outcome in outcomes] == [0] * WORLD, "\n".join(outcome.log for outcome in outcomes)
    results = [outcome.result for outcome in outcomes]
    assert results[0]["healed"]["reason"] == ""
    committed = [results[0][name]["step"] for name in (*SURVIVED, "healed")]
    store = open_store(f"s3://{bucket}/run")
    faults.heal()
    assert committed_steps(store) == committed
    for step in committed:
        assert not find_damage(store, read_commit(store, step))
    for result in results:
        assert {name: result[name]["reason"] for name in SURVIVED} == dict.fromkeys(SURVIVED, "")
        for name, (_, _, said) in FAILED.items():
            assert result[name]["event"] == "save_failed", name
            assert_says(result[name]["reason"], said)
            assert result[name]["seconds"] < SECONDS + PATIENCE, name
            assert result[name]["reason"] == results[0][name]["reason"]
            if "silent" in name:
                assert result[name]["steps"] > 5, name  # trained meanwhile
        for name in READ:
            assert result[f"read: {name}"]["resumed"] == committed[-1], name
            assert result[f"read: {name}"]["digest"] == result["healed"]["digest"], name
        for name in UNREAD:
            one, everyone = (result[f"unread: {name}, {who}"] for who in ("one", "all"))
            assert_says(one["error"], ["rank 1: .*rank-00001.bin"])
            assert_says(everyone["error"], ["rank 0: .*rank-0000", "rank 1: .*rank-0000"])
            assert max(one["seconds"], everyone["seconds"]) < 2 * PATIENCE


def assert_says(text: str, patterns: list[str]) -> None:
    for pattern in patterns:
        assert re.search(pattern, text), (pattern, text)
