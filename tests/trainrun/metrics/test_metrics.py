"""Metric lines and the console."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainrun.metrics import lines
from trainrun.metrics.console import duration, scaled, sized, spread_of, step_line, summary_line
from trainrun.settings import ShardingSettings, TrainSettings


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


RECORD: dict[str, Any] = {
    **{"step": 30, "steps": 1000, "loss": 1.23456, "learning_rate": 3e-3, "gradient_norm": 0.5, "tokens": 491520},
    **{"tokens_per_second": 81234.5, "mfu": 0.41234, "mfu_convention": "6N+12Lhs", "data_wait": 0.0031},
    **{"memory_bytes": 61.24 * 1024**3, "skipped": 2, "seconds_per_step": 0.2, "seconds_left": 75.2},
    **{"world": 8, "strategy": "fsdp2", "precision": "bf16"},
}


def test_a_step_is_one_line() -> None:
    assert step_line(RECORD, spread="fsdp2") == (
        "step   30/1000  loss 1.2346  lr 3.0e-03  norm 0.50  81.2k tok/s  mfu 41.2%  1:15 left  data 0.3%  mem 61.24 GiB  "
        "8 x fsdp2 x bf16  mfu by 6N+12Lhs"
    )


def test_a_line_says_no_mfu_where_there_is_none_and_skipped_steps_in_fp16_only() -> None:
    line = step_line({**RECORD, "mfu": None, "mfu_convention": None, "precision": "fp16"}, spread="ddp+tp2")
    assert line == (
        "step   30/1000  loss 1.2346  lr 3.0e-03  norm 0.50  81.2k tok/s  1:15 left  data 0.3%  mem 61.24 GiB  skipped 2  "
        "8 x ddp+tp2 x fp16"
    )


@pytest.mark.parametrize(
    ("strategy", "sharding", "spread"),
    [
        ("ddp", {"tensor_parallel": 2}, "ddp+tp2"),
        ("fsdp2", {}, "fsdp2"),
        ("fsdp2", {"shard_size": 4, "tensor_parallel": 2}, "fsdp2/4+tp2"),
        ("zero3", {"offload_optimizer": "cpu"}, "zero3+cpu"),
        ("zero3", {"offload_optimizer": "nvme", "offload_parameters": "cpu", "nvme_path": "/local"}, "zero3+cpu+nvme"),
    ],
)
def test_a_line_says_how_the_model_is_spread(strategy: Any, sharding: dict[str, Any], spread: str) -> None:
    assert spread_of(TrainSettings(strategy=strategy, sharding=ShardingSettings(**sharding))) == spread


def test_80_columns_hold_what_matters_most() -> None:
    line = step_line(RECORD, spread="fsdp2", width=80)
    assert line == "step   30/1000  loss 1.2346  lr 3.0e-03  norm 0.50  81.2k tok/s  mfu 41.2%"


@given(width=st.integers(1, 200))
def test_a_line_is_never_wider_than_the_terminal(width: int) -> None:
    line = step_line(RECORD, spread="fsdp2", width=width)
    assert len(line) <= width
    assert step_line(RECORD, spread="fsdp2").startswith(line)


def test_the_last_line_sums_up() -> None:
    end = {
        **{"step": 1000, "steps_here": 990, "tokens_here": 16_220_160, "seconds": 192.4, "tokens_per_second": 84304.4},
        **{"mfu": 0.41234, "mfu_convention": "6N+12Lhs", "skipped": 1},
    }
    assert summary_line(end) == (
        "Done at step 1000: 990 steps and 16.2M tokens in 3:12, 84.3k tok/s, mfu 41.2% by 6N+12Lhs, 1 skipped."
    )
    assert summary_line({**end, "mfu": None, "steps_here": 1}) == (
        "Done at step 1000: 1 step and 16.2M tokens in 3:12, 84.3k tok/s, 1 skipped."
    )


def test_what_json_lacks_is_null(tmp_path: Path) -> None:
    sink = lines.MetricLines(tmp_path)
    sink.write({"step": 1, "loss": math.nan, "gradient_norm": math.inf, "learning_rate": 0.5})
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        **{"time": pytest.approx(time.time(), abs=60), "step": 1, "loss": None, "gradient_norm": None, "learning_rate": 0.5}
    }


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999.7, "1000"), (1000, "1k"), (2.5e6, "2.5M"), (3e9, "3G"), (4e12, "4T")]
)
def test_numbers_have_units(number: float, text: str) -> None:
    assert scaled(number) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (208.4 * 1024, "208 KiB"), (2**40, "1024 GiB"), (5e12, "4657 GiB")],
)
def test_bytes_have_units(count: float, text: str) -> None:
    assert sized(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3600, "1:00:00"), (90061, "25:01:01")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
