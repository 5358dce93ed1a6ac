"""A file in one rank's state folder asks all ranks for a checkpoint, at the same step and without a wait; training goes on."""

from __future__ import annotations

from typing import Any

import pytest

CASES: dict[str, dict[str, Any]] = {
    "one": {"asked": [(1, 5)]},
    "twice": {"asked": [(1, 5), (1, 15)], "pause": 0.05},
    "both": {"asked": [(0, 5), (1, 5)]},
    "old": {"asked": [(1, 0)]},
    "saved-anyway": {"asked": [(1, 10)], "arguments": ["--checkpoint.every_steps=10"]},
    "interval": {"asked": [(1, 5)], "arguments": ["--checkpoint.every_steps=10"]},
    "kept": {"asked": [(1, 5)], "arguments": ["--checkpoint.every_steps=10", "--checkpoint.keep=2"]},
    "slow": {"asked": [(1, 6), (1, 7)], "arguments": ["--steps=60"], "slow": 0.2, "pause": 0.1},
    "stale": {"asked": [(1, 20)]},
}


@pytest.fixture(scope="module")
def happened(lasting_ranks: Any, dataset: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    arguments = [
        *("--sequence_length=16", "--batch_tokens=128", "--micro_batch=2", "--steps=20", "--log_every=1000"),
        *("--model.layers=1", "--model.width=16", "--model.heads=2", "--strategy=ddp"),
        *(f"--data={dataset}", f"--checkpoint.location={tmp_path_factory.mktemp('runs')}", "--checkpoint.every_steps=1000"),
    ]
    return lasting_ranks("requests_to_save", world=2, arguments=arguments, cases=CASES)


@pytest.mark.parametrize(
    ("name", "requested", "committed"),
    [
        ("one", [5], [5, 20]),
        ("twice", [5, 15], [5, 15, 20]),
        ("both", [5], [5, 20]),
        ("old", [], [20]),
        ("saved-anyway", None, [10, 20]),
        ("interval", [5], [5, 10, 20]),
        ("kept", [5], [10, 20]),
        ("stale", [], [20]),
    ],
)
def test_one_rank_is_asked_and_all_save_that_step(
    happened: Any, name: str, requested: list[int] | None, committed: list[int]
) -> None:
    assert [outcome.code for outcome in happened] == [0, 0], happened[0].log + happened[1].log
    first, second = (outcome.result[name] for outcome in happened)
    assert [step for event, step in first["events"] if event == "save_requested"] == (requested or [])
    assert first["events"] == second["events"], "the ranks saved apart"
    assert first["committed"] == committed
    assert (first["is_there"], second["is_there"]) == tuple(rank in dict(CASES[name]["asked"]) for rank in (0, 1))


def test_no_step_waits_for_a_save_that_is_under_way(happened: Any) -> None:
    for outcome in happened:
        found = outcome.result["slow"]
        steps = [step for event, step in found["events"] if event == "save_requested"]
        assert len(steps) == 2
        assert steps[0] == 6
        assert 7 < steps[1] < 60  # that of step 6 was still under way at step 7
        assert 0 <= steps[1] - found["known_at"]["6"] <= 1  # and no longer than it had to
        assert {*steps, 60} == set(found["committed"])
        assert found["longest"] < 0.6
