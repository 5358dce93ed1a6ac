"""Reading ahead changes nothing but the time that the loop waits."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from torch import Tensor

from trainrun.data import feed as feeds
from trainrun.data.batch import Batch
from trainrun.data.feed import Feed, Positions, Step
from trainrun.ranks import Ranks


class Numbers(Feed):
    """Position p stands for the number p. Remembers which thread read what."""

    def __init__(self, *, rank: int = 0, seconds: float = 0.0) -> None:
        super().__init__(batch=8, share=4, micro_batch=2, ranks=Ranks(rank, 2, rank, torch.device("cpu"), None, None))
        self.seconds = seconds
        self.read_by: list[tuple[str, list[int]]] = []

    @property
    def valid_tokens(self) -> int:
        return 8

    def _read(self, positions: Positions) -> tuple[Tensor, ...]:
        time.sleep(self.seconds)
        self.read_by.append((threading.current_thread().name.split("_")[0], positions.tolist()))
        return (torch.from_numpy(positions.astype(np.int64)),)

    def _as_batch(self, *tensors: Tensor) -> Batch:
        return Batch(inputs=tensors[0], targets=tensors[0])


@pytest.fixture(autouse=True)
def _threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is read counts as slow, from the first on."""
    monkeypatch.setattr(feeds, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(feeds, "ENOUGH_SLOW", 1)


def step(feed: Numbers) -> list[list[int]]:
    found = [batch.inputs.tolist() for batch in feed.micro_batches()]
    feed.advance()
    return found


def test_all_but_the_first_step_is_read_ahead() -> None:
    feed = Numbers(rank=1)
    assert [step(feed), step(feed)] == [[[4, 5], [6, 7]], [[12, 13], [14, 15]]]
    threads = {tuple(positions): thread for thread, positions in feed.read_by}
    assert threads == {(4, 5): "MainThread", (6, 7): "MainThread", (12, 13): "feed", (14, 15): "feed"} | {
        ahead: "feed"
        for ahead in ((20, 21), (22, 23))
        if ahead in threads  # the next is on its way
    }


def test_data_04_the_position_counts_what_was_trained_not_what_was_read() -> None:
    feed = Numbers()
    for _ in feed.micro_batches():
        assert feed.position == 0
    feed.advance()
    assert feed.position == 8


@pytest.mark.parametrize("position", [0, 8, 3, 80])
def test_what_was_read_ahead_of_another_position_is_thrown_away(position: int) -> None:
    feed = Numbers()
    step(feed)
    feed.position = position
    assert step(feed) == [[position, position + 1], [position + 2, position + 3]]


def test_a_step_that_is_begun_again_gives_the_same() -> None:
    feed = Numbers()
    next(feed.micro_batches())
    assert step(feed) == [[0, 1], [2, 3]]


def test_the_micro_batch_may_change_between_steps() -> None:
    feed = Numbers()
    step(feed)
    feed.set_micro_batch(4)
    assert step(feed) == [[8, 9, 10, 11]]
    feed.set_micro_batch(3)
    assert step(feed) == [[16, 17, 18], [19]]


def test_a_sample_moves_nothing_on() -> None:
    feed = Numbers(rank=1)
    assert feed.sample(3).inputs.tolist() == [4, 5, 6]
    assert step(feed) == [[4, 5], [6, 7]]


def test_waiting_is_what_is_left_of_reading_when_the_model_was_busy() -> None:
    feed = Numbers(seconds=0.03)
    batches = feed.micro_batches()
    next(batches)
    first = feed.waited
    assert first >= 0.06  # nobody could read ahead of the first step
    time.sleep(0.3)
    assert next(batches) is not None
    feed.advance()
    next(feed.micro_batches())
    assert feed.waited - first < 0.05


def test_a_failure_while_reading_ahead_is_raised_where_the_step_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Numbers()

    def fail(position: int, micro_batch: int) -> Step:
        raise OSError("the disk is gone")

    monkeypatch.setattr(feed, "_read_pinned", fail)
    assert step(feed) == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="the disk is gone"):
        next(feed.micro_batches())


def test_quick_reads_are_not_handed_over_and_a_hiccup_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "SLOW_SECONDS", 0.02)
    monkeypatch.setattr(feeds, "ENOUGH_SLOW", 2)
    feed = Numbers()
    for seconds in (0.0, 0.02, 0.0, 0.0, 0.02, 0.0):
        feed.seconds = seconds
        step(feed)
    assert {thread for thread, _ in feed.read_by} == {"MainThread"}
    feed.seconds = 0.02
    for _ in range(3):
        step(feed)
    assert {thread for thread, _ in feed.read_by} == {"MainThread", "feed"}
