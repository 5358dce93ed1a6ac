"""A request to stop, at any moment and to any rank, ends all ranks at the same step, in time, with what could be saved."""

from __future__ import annotations

from typing import Any

import pytest
import stops

from trainrun.checkpoint.stopping import Promise

CASES: list[dict[str, Any]] = [
    {"name": "forward", "phase": "forward"},
    {"name": "between", "phase": "between", "text": ""},
    {"name": "save", "phase": "save"},
    {"name": "in-flight", "phase": "forward", "every": 2, "slow": 0.3},
    {"name": "wait", "phase": "wait", "slow": 0.4, "text": "20 seconds left; by hand"},
    {"name": "resume", "phase": "resume", "run": "forward", "text": "by hand"},
    {"name": "steps", "phase": "steps", "run": "forward"},
    {"name": "start", "phase": "start", "text": ""},
    {"name": "too-slow", "phase": "forward", "slow": 30.0, "text": "4.5"},
    {"name": "does-not-fit", "phase": "forward", "step": 5, "every": 2, "slow": 0.4, "text": "4"},
    {"name": "no-time", "phase": "forward", "stop_seconds": 1.0},
]


@pytest.fixture(scope="module")
def happened(lasting_ranks: Any, dataset: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("runs")
    arguments = [
        *("--sequence_length=16", "--batch_tokens=128", "--micro_batch=2", "--steps=1000", "--log_every=1000"),
        *("--model.layers=1", "--model.width=16", "--model.heads=2", "--strategy=ddp"),
        *(f"--data={dataset}", f"--checkpoint.location={folder}", "--checkpoint.timeout_seconds=50"),
    ]
    cases = [*CASES, *stops.at_random_times(20, seed=5)]
    return lasting_ranks("stops", world=2, arguments=arguments, cases=cases)


def of(happened: Any, name: str) -> dict[str, Any]:
    """What happened in a case, with the seconds since the request, of which only one rank knows."""
    assert [outcome.code for outcome in happened] == [0, 0], happened[0].log + happened[1].log
    first, second = (outcome.result[name] for outcome in happened)
    assert {**first, "seconds": 0} == {**second, "seconds": 0}, "the ranks ended apart"
    assert first["code"] == 75
    return {**first, "seconds": max(first["seconds"], second["seconds"])}


@pytest.mark.parametrize(
    ("name", "completed", "committed"),
    [
        ("forward", 3, [3]),
        ("between", 3, [3]),
        ("save", 4, [4]),  # after the step's own agreement
        ("in-flight", 3, [2, 3]),
        ("wait", 3, [3]),
    ],
)
def test_ela_03_one_rank_is_asked_and_all_save_the_same_step(
    happened: Any, name: str, completed: int, committed: list[int]
) -> None:
    found = of(happened, name)
    assert (found["completed"], found["committed"]) == (completed, committed)


def test_ela_03_at_random_moments(happened: Any) -> None:
    for n in range(20):
        found = of(happened, f"time{n}")
        assert max(found["committed"], default=0) == found["completed"]


def test_nothing_is_trained_when_the_request_comes_before_the_first_step(happened: Any) -> None:
    for name, committed in (("resume", [3]), ("steps", [3]), ("start", [])):
        found = of(happened, name)
        assert (found["completed"], found["committed"]) == (max(committed, default=0), committed)


def test_a_store_that_is_too_slow_does_not_hold_the_ranks(happened: Any) -> None:
    found = of(happened, "too-slow")
    assert found["committed"] == []
    assert found["seconds"] < 4.5
    assert (
        "WARNING: Step 3 could not be saved in the 4 s that were left. There is no checkpoint to resume from." in happened[0].log
    )


def test_what_does_not_fit_as_measured_is_not_begun(happened: Any) -> None:
    found = of(happened, "does-not-fit")
    assert found["seconds"] < 3
    resumable = max(found["committed"])
    assert resumable < found["completed"]
    assert "WARNING: Step" in happened[0].log
    assert f"A resume goes on from step {resumable}." in happened[0].log
    found = of(happened, "no-time")
    assert found["committed"] == []
    assert "WARNING: Step 3 is not saved: 1 s were left. There is no checkpoint to resume from." in happened[0].log


def test_before_training_it_is_said_what_the_last_save_will_need(happened: Any) -> None:
    assert "A checkpoint has 0.0862 MB. When asked to stop, the last one has 30 s (checkpoint.stop_seconds): " in happened[0].log


def test_once_measured_it_is_said_whether_the_last_save_fits_and_again_only_when_that_changes() -> None:
    promise = Promise(30.0)
    text, details = promise.measured(4.0, 10**9) or ("", {})
    assert text == ("When asked to stop, the last one has 30 s (checkpoint.stop_seconds), and a save of 1 GB takes 4 s: it fits.")
    assert details == {"fits": True, "seconds": 4.0, "stop_seconds": 30.0}
    assert promise.measured(5.0, 10**9) is None
    text, details = promise.measured(41.0, 10**10) or ("", {})
    assert text.startswith(
        "WARNING: a save of 10 GB takes 41 s, and the last one has 30 s (checkpoint.stop_seconds), of which 3 s"
    )
    assert "it does not fit, and what is trained since the last save will be lost. Raise timeouts.stop_grace" in text
    assert details["fits"] is False
