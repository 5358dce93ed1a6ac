"""How long a stop request leaves, and what is done with it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainrun.deadline import EXIT_SECONDS, LastSave, last_save, seconds_in, seconds_of, urgency
from trainrun.stop import StopFlag


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", 30.0),
        ("\n", 30.0),
        ("75", 75.0),
        (" 12.5\n", 12.5),
        ("90 seconds left; spot interruption notice: terminate at 2026-11-30T12:00:00Z\n", 90.0),
        ("by hand", 30.0),
        ("-5", 0.0),
        ("nan", 30.0),
    ],
)
def test_a_stop_file_holds_seconds_or_none(text: str, seconds: float) -> None:
    assert seconds_in(text, otherwise=30.0) == seconds


@given(st.text())
def test_no_stop_file_is_wrong(text: str) -> None:
    assert seconds_in(text, otherwise=30.0) >= 0.0


@given(st.lists(st.floats(-10.0, 1e9), min_size=1))
def test_the_largest_number_is_of_the_rank_that_has_the_least_time(seconds: list[float]) -> None:
    numbers = [urgency(each) for each in seconds]
    assert min(numbers) > 0, "0 is no request"
    assert seconds_of(max(numbers)) == pytest.approx(min(max(0.0, min(seconds)), 365 * 24 * 3600), abs=1e-3)


def test_the_present_step_is_saved_where_it_fits() -> None:
    assert last_save(left=30.0, seconds=20.0, under_way=None) == LastSave(finish=False, save=True)
    assert last_save(left=30.0, seconds=28.0, under_way=None) == LastSave(finish=False, save=False)
    assert last_save(left=30.0, seconds=None, under_way=None) == LastSave(finish=False, save=True), "nothing speaks against it"


def test_a_save_under_way_is_finished_first() -> None:
    assert last_save(left=30.0, seconds=15.0, under_way=5.0) == LastSave(finish=True, save=True)
    assert last_save(left=30.0, seconds=15.0, under_way=1.0) == LastSave(finish=True, save=False)
    assert last_save(left=30.0, seconds=28.0, under_way=100.0) == LastSave(finish=True, save=False)


@given(left=st.floats(0, EXIT_SECONDS), seconds=st.none() | st.floats(0, 1e4), under_way=st.none() | st.floats(0, 1e4))
def test_without_time_nothing_is_begun(left: float, seconds: float | None, under_way: float | None) -> None:
    assert last_save(left=left, seconds=seconds, under_way=under_way) == LastSave(finish=False, save=False)


def test_the_request_that_leaves_the_least_time_counts(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        flag = StopFlag(tmp_path, stop_seconds=30.0)
        assert flag.urgency() == 0
        flag.hear(0)
        assert flag.deadline is None
        (tmp_path / "stop").mkdir()  # cannot be read, but it is there
        assert seconds_of(flag.urgency()) == pytest.approx(30.0, abs=1)
        (tmp_path / "stop").rmdir()
        (tmp_path / "stop").write_text("60 seconds left; by hand")
        assert seconds_of(flag.urgency()) == pytest.approx(60.0, abs=1)
        os.utime(tmp_path / "stop", (1.0, 1.0))  # older than this process, which begins to count when it begins
        assert seconds_of(flag.urgency()) == pytest.approx(60.0, abs=1)
        os.kill(os.getpid(), signal.SIGTERM)
        told = flag.urgency()
        assert seconds_of(told) == pytest.approx(30.0, abs=1)
        flag.hear(told)
        first = flag.deadline
        assert first == pytest.approx(time.monotonic() + 30.0, abs=1)
        flag.hear(urgency(1000.0))
        assert flag.deadline == first, "nobody gives time back"
    finally:
        signal.signal(signal.SIGTERM, handler)
