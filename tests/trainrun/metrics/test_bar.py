"""The live bar: on terminals only, one line, and never in the way of other lines."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from trainrun.metrics import bar
from trainrun.metrics.bar import Bar, open_bar


def opened(steps: int = 100) -> Bar:
    made = open_bar(steps)
    assert made is not None
    return made


def test_the_bar_is_one_line_rewritten_in_place(terminal: Any) -> None:
    terminal.connect()
    terminal.resize(100)
    live = opened()
    for step in (1, 25, 50):
        live.update(step, tokens_per_second=81234.0, seconds_left=75)
    graph = "[" + "#" * 20 + "-" * 20 + "]"
    assert terminal.screen() == [f"{graph} 50/100  50.0%  1:15 left  81.2k tok/s"]
    live.close()
    assert terminal.screen() == [""]


def test_lines_stay_whole_above_the_bar_whatever_stream_they_come_by(terminal: Any) -> None:
    terminal.connect()
    live = opened()
    live.update(1, tokens_per_second=1.0, seconds_left=1)
    print("step 1")
    live.update(2, tokens_per_second=1.0, seconds_left=1)
    print("a warning", file=sys.stderr)
    sys.stdout.write("half a line, ")
    live.update(3, tokens_per_second=1.0, seconds_left=1)
    sys.stdout.write("the other half\n")
    sys.stdout.writelines(["two\n", "lines\n"])
    screen = terminal.screen()
    assert screen[:-1] == ["step 1", "a warning", "half a line, the other half", "two", "lines"]
    assert screen[-1].endswith("3/100  3.0%  0:01 left  1 tok/s")
    live.close()
    print("the end")
    assert terminal.screen()[-2:] == ["the end", ""]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (50, "[#######-----] 60/100  60.0%  1:15 left  1M tok/s"),
        (40, "60/100  60.0%  1:15 left  1M tok/s"),
        (30, "60/100  60.0%  1:15 left"),
        (12, "60/100"),
        (5, "60/1"),
    ],
)
def test_a_narrow_terminal_gets_less_of_it_and_never_two_lines(terminal: Any, columns: int, expected: str) -> None:
    terminal.connect()
    terminal.resize(columns)
    live = opened()
    live.update(1, tokens_per_second=1e6, seconds_left=75)
    live.update(60, tokens_per_second=1e6, seconds_left=75)
    assert terminal.screen() == [expected]
    live.close()


def test_a_hidden_bar_makes_room_until_the_next_update(terminal: Any) -> None:
    terminal.connect()
    live = opened()
    live.update(1, tokens_per_second=1.0, seconds_left=1)
    live.hide()
    os.write(terminal.stream.fileno(), b"written by a C library\n")  # past Python's streams
    live.update(2, tokens_per_second=1.0, seconds_left=1)
    screen = terminal.screen()
    assert screen[0] == "written by a C library"
    assert " 2/100 " in screen[1]
    live.close()


def test_drawing_is_rare_but_the_last_step_is_always_shown(terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal.connect()
    monkeypatch.setattr(bar, "SECONDS_BETWEEN_DRAWS", 60.0)
    live = opened()
    for step in (1, 2, 99):
        live.update(step, tokens_per_second=1.0, seconds_left=1)
    assert " 1/100 " in terminal.screen()[0]
    live.update(100, tokens_per_second=1.0, seconds_left=0)
    assert " 100/100  100.0% " in terminal.screen()[0]
    live.close()


def test_streams_that_are_no_terminals_are_left_alone(terminal: Any, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.connect()
    sys.stdout, file = open("/dev/null", "w"), sys.stdout  # noqa: PTH123, SIM115 - a stream that is no terminal
    untouched = sys.stdout
    live = opened()
    assert sys.stdout is untouched
    live.update(1, tokens_per_second=1.0, seconds_left=1)
    print("step 1")
    assert terminal.screen()[0].startswith("[")
    assert "step 1" not in "".join(terminal.screen())
    live.close()
    untouched.close()
    sys.stdout = file


def test_no_bar_without_a_terminal_or_on_a_dumb_one(terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal.connect()
    monkeypatch.setenv("TERM", "dumb")
    assert open_bar(1) is None
    monkeypatch.delenv("TERM")
    assert open_bar(1) is None
    monkeypatch.setenv("TERM", "xterm")
    with open("/dev/null", "w") as file:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(sys, "stderr", file)
        assert open_bar(1) is None
