"""The interval that costs least, and how ranks come to the same one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainrun.checkpoint.interval import FIRST_STEPS, Cost, Interval, SaveCosts, best_steps, failure_seconds
from trainrun.models.gpt import GPT
from trainrun.optimizer import bundled
from trainrun.run import Run
from trainrun.settings import CheckpointSettings

SECONDS = st.floats(1e-3, 1e4)
AUTO = CheckpointSettings(every_steps="auto", failures_per_node_day=1.0)


def waste(interval: float, *, lost: float, mean: float) -> float:
    """The share of time that saving and failing take together, to first order: what Young's interval makes least."""
    return lost / interval + interval / 2 / mean


@given(step=SECONDS, lost=SECONDS, mean=st.floats(1e3, 1e8))
def test_no_other_number_of_steps_wastes_noticeably_less(step: float, lost: float, mean: float) -> None:
    steps = best_steps(Cost(step=step, lost=lost, save=0.0), failure_seconds=mean)
    here = waste(steps * step, lost=lost, mean=mean)
    for other in (steps - 2, steps + 2, steps // 2 - 1, 2 * steps + 1, 10 * steps):
        if other >= 1:
            assert waste(other * step, lost=lost, mean=mean) >= here * (1 - 1e-9)


@given(step=SECONDS, lost=SECONDS, save=st.floats(0.0, 1e5), mean=st.floats(1.0, 1e9))
def test_a_save_is_always_done_before_the_next(step: float, lost: float, save: float, mean: float) -> None:
    steps = best_steps(Cost(step=step, lost=lost, save=save), failure_seconds=mean)
    assert steps >= 1
    assert steps * step >= save * (1 - 1e-9)


@given(lost=SECONDS, mean=st.floats(1e3, 1e8))
def test_dearer_saves_and_rarer_failures_make_longer_intervals(lost: float, mean: float) -> None:
    def steps(lost: float, mean: float) -> int:
        return best_steps(Cost(step=0.5, lost=lost, save=0.0), failure_seconds=mean)

    assert steps(lost, mean) <= steps(2 * lost, mean)
    assert steps(lost, mean) <= steps(lost, 2 * mean)


def test_the_numbers_of_a_training() -> None:
    """By hand: 2,048 nodes at 0.004 a day fail every 10,547 s; sqrt(2 x 1.5 x 10547) is 178 s, 12 steps of 15 s."""
    mean = failure_seconds(nodes=2048, failures_per_node_day=0.004)
    assert mean == pytest.approx(10547, abs=1)
    assert best_steps(Cost(step=15.0, lost=1.5, save=40.0), failure_seconds=mean) == 12
    assert best_steps(Cost(step=15.0, lost=1.5, save=400.0), failure_seconds=mean) == 27  # not before the last is done


def test_a_save_costs_what_the_steps_beside_it_are_longer() -> None:
    costs = SaveCosts()
    costs.step(60.0, saving=False)  # compiles
    for _ in range(5):
        costs.step(1.0, saving=False)
    for seconds in (1.5, 1.1, 1.1, 1.0):
        costs.step(seconds, saving=True)
    cost = costs.committed(3.8)
    assert cost is not None
    assert (cost.step, cost.save) == (1.0, 3.8)
    assert cost.lost == pytest.approx(0.7)
    costs.step(9.0, saving=True)
    costs.failed()
    cost = costs.committed(0.5)  # done within the step that began it: nothing was beside it
    assert cost is not None
    assert (cost.lost, cost.save) == (0.0, 0.5)  # of two the less
    costs.step(2.0, saving=True)
    cost = costs.committed(5.0)
    assert cost is not None
    assert cost.lost == pytest.approx(0.7)  # the median of three


def test_nothing_is_chosen_before_a_step_without_a_save_is_known() -> None:
    costs = SaveCosts()
    costs.step(5.0, saving=True)
    costs.step(1.0, saving=True)
    assert costs.committed(1.0) is None


def test_a_number_of_steps_saves_its_multiples() -> None:
    interval = Interval(CheckpointSettings(every_steps=3), nodes=1)
    assert [step for step in range(1, 11) if interval.due(step, under_way=False)] == [3, 6, 9]
    assert interval.propose(Cost(step=1.0, lost=1.0, save=1.0)) is None


def test_auto_saves_early_and_then_as_rank_0_proposes_once_all_have_heard_it() -> None:
    first, other = (Interval(AUTO, nodes=2) for _ in range(2))
    for interval in (first, other):
        interval.go_on_from(100)
        assert next(step for step in range(101, 115) if interval.due(step, under_way=False)) == 100 + FIRST_STEPS
        interval.begin(100 + FIRST_STEPS)
    said = first.propose(Cost(step=10.0, lost=2.0, save=30.0))
    expected = round(math.sqrt(2 * 2.0 * 43200) / 10)
    assert first.proposed == expected == 42
    assert said == (
        "Saving every 42 steps (7 min): a save costs 2 s of training and is done after 30 s, and with 1 failures per node and "
        "day (checkpoint.failures_per_node_day) 2 nodes fail every 12 h."
    )
    assert not first.due(209, under_way=False), "a proposal is not yet agreed on"
    assert first.due(210, under_way=False)
    for interval in (first, other):
        interval.adopt(first.proposed)
        assert not interval.due(151, under_way=False)
        assert interval.due(152, under_way=False)
        assert not interval.due(152, under_way=True)
    other.adopt(0)
    assert other.due(152, under_way=False)


def test_the_interval_moves_only_noticeably() -> None:
    interval = Interval(AUTO, nodes=1)
    interval.propose(Cost(step=1.0, lost=1.0, save=1.0))
    before = interval.proposed
    assert interval.propose(Cost(step=1.05, lost=1.1, save=1.0)) is None
    assert interval.proposed == before
    said = interval.propose(Cost(step=1.0, lost=4.0, save=1.0))
    assert said is not None
    assert f"Saving every {interval.proposed} steps (14 min) instead of {before}: " in said
    assert interval.proposed == pytest.approx(2 * before, abs=1)


def test_a_run_measures_its_saves_and_adopts_what_they_cost(
    alone: Callable[..., Run], dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank; that ranks adopt the same at the same step is shown above."""
    often = "--checkpoint.failures_per_node_day=1440"  # every minute, so that the interval is of some seconds at most
    run = alone(f"--data={dataset}", "--steps=10000", f"--checkpoint.location={tmp_path}", "--checkpoint.every_steps=auto", often)
    data = run.tokens()
    gpt = GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    model, optimizer = run.prepare(gpt, bundled(gpt, run.settings.optimizer))
    state = run.state(model=model, optimizer=optimizer, data=data)
    state.resume()
    begun: list[int] = []
    for step in run.steps():
        for batch in data.micro_batches():
            run.backward(model.loss(batch))
        run.step(optimizer)
        if state.save() and step not in begun:
            begun.append(step)
        if len(begun) == 2:
            state.wait()
            state.close()
            break
    said = capsys.readouterr().err
    chosen = re.search(r"Saving every (\d+) steps? \(", said)
    assert chosen is not None, said
    assert begun[0] == FIRST_STEPS
    assert begun[1] >= FIRST_STEPS + int(chosen[1])
    events = [json.loads(line) for path in (tmp_path / "state/metrics").iterdir() for line in path.open()]
    interval = next(event for event in events if event.get("event") == "interval")
    assert interval["steps"] == int(chosen[1])
    assert interval["steps"] * interval["step_seconds"] >= 0.9 * interval["save_seconds"]
    assert {event["event"] for event in events if "event" in event} >= {"committed", "last_save"}
