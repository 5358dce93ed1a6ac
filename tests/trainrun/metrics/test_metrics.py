"""Metric lines and the console."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainrun.metrics import lines
from trainrun.metrics.console import duration, scaled, step_line


def test_a_file_is_full_after_so_many_lines_and_each_line_is_there_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LINES_PER_FILE", 3)
    sink = lines.MetricLines(tmp_path / "metrics")
    for step in range(7):
        sink.write({"step": step})
        newest = sorted((tmp_path / "metrics").iterdir())[-1].read_text().splitlines()[-1]
        assert json.loads(newest)["step"] == step
    names = sorted(path.name for path in (tmp_path / "metrics").iterdir())
    assert [name.split("-")[1] for name in names] == ["00000.jsonl", "00001.jsonl", "00002.jsonl"]
    assert len({name.split("-")[0] for name in names}) == 1


def test_nothing_is_made_before_there_is_something_to_say(tmp_path: Path) -> None:
    lines.MetricLines(tmp_path / "metrics").close()
    assert not (tmp_path / "metrics").exists()


def test_a_step_is_one_line() -> None:
    record = {
        **{"step": 30, "steps": 1000, "loss": 1.23456, "learning_rate": 3e-3, "gradient_norm": 0.5, "tokens": 491520},
        **{"tokens_per_second": 81234.5, "seconds_left": 75.2, "world": 2, "precision": "fp32"},
    }
    assert step_line(record) == (
        "step   30/1000    3.0%  loss 1.2346  lr 3.00e-03  norm 0.50  81.2k tok/s  492k tokens  2 x fp32  1:15 left"
    )


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999.7, "1000"), (1000, "1k"), (2.5e6, "2.5M"), (3e9, "3G"), (4e12, "4T")]
)
def test_numbers_have_units(number: float, text: str) -> None:
    assert scaled(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3600, "1:00:00"), (90061, "25:01:01")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
