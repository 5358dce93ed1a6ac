"""Saves go on beside training: what happens to them there, and what they leave behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainrun.checkpoint import arena, share, snapshot
from trainrun.checkpoint.damage import find_damage
from trainrun.checkpoint.digest import model_digest
from trainrun.checkpoint.layout import committed_steps, read_commit
from trainrun.config import ConfigError
from trainrun.errors import CheckpointError
from trainrun.run import Run
from trainrun.store import open_store

WORLD = 3


@pytest.fixture
def told(ranks: Any, tiny: list[str], dataset: str, tmp_path: Path) -> Callable[..., tuple[list[dict[str, Any]], str]]:
    """Runs scenarios of `saves.run_rank`: what each rank says of all, and the log of rank 0."""

    def run(world: int, scenarios: dict[str, dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        for name, scenario in scenarios.items():
            own = [*tiny, f"--data={dataset}", "--batch_tokens=96", "--log_every=1000"]
            if not any("location" in argument for argument in scenario["arguments"]):
                own += [f"--checkpoint.location={tmp_path / name}"]
            scenario["arguments"] = [*own, *scenario["arguments"]]
        outcomes = ranks("saves", world=world, scenarios=scenarios)
        assert [outcome.code for outcome in outcomes] == [0] * world, "\n".join(outcome.log for outcome in outcomes)
        return [outcome.result for outcome in outcomes], outcomes[0].log

    return run


def commits(folder: Path) -> list[int]:
    store = open_store(str(folder / "run"))
    for step in committed_steps(store):
        assert not find_damage(store, read_commit(store, step))
    return committed_steps(store)


def reasons(result: dict[str, Any]) -> list[tuple[int, str]]:
    return [(step, details["reason"]) for name, step, details in result["events"] if name == "save_failed"]


def test_ckpt_09_all_ranks_agree_on_what_became_of_each_of_many_saves(told: Any, tmp_path: Path) -> None:
    """A writer that is killed, one that hangs, a weight that the user's code changes; and saves with no gap between them."""
    every = "--checkpoint.every_steps"
    results, log = told(
        WORLD,
        {
            "killed": {"arguments": ["--steps=9", f"{every}=3"], "fault": (1, "kill_writer_after_put(1)"), "pause": 0.1},
            "stopped": {
                "arguments": ["--steps=6", f"{every}=4", "--checkpoint.timeout_seconds=3"],
                "fault": (2, "stop_writer_after_put(1)"),
            },
            "changed": {"arguments": ["--steps=4", f"{every}=2"], "change_on": 2},
            "ckpt-09": {"arguments": ["--steps=20", f"{every}=1", "--checkpoint.keep=20"]},
            "restored": {"arguments": ["--steps=20", f"{every}=1", f"--checkpoint.location={tmp_path / 'ckpt-09'}"]},
        },
    )
    for result in results:
        [(step, reason)] = reasons(result["killed"])
        assert step == 3
        assert "rank 1: its writer (process " in reason
        assert "ended by SIGKILL, while writing" in reason
        assert "rank-00001.bin" in reason
        [(step, reason)] = reasons(result["stopped"])
        assert step == 4
        assert "rank 2: its writer" in reason
        assert "hangs: it was not done after " in reason
        assert "rank-00002.bin" in reason
        for step, reason in reasons(result["changed"]):
            assert reason.startswith("rank 2: model/scale changed between state.save() and the next run.step()"), step
        assert "error" not in result["ckpt-09"]
    assert commits(tmp_path / "killed") == [6, 9]
    assert commits(tmp_path / "stopped") == [6]
    assert [step for step, _ in reasons(results[0]["changed"])] == [2]
    assert commits(tmp_path / "changed") == [4]
    assert commits(tmp_path / "ckpt-09") == list(range(1, 21))
    assert "WARNING: saving step 3 failed (1 of 3 in a row): rank 1: " in log
    for result in results:
        assert result["restored"]["resumed"] == 20
        assert result["restored"]["restored"] == result["ckpt-09"]["saved"]["20"]


def test_ckpt_13_a_store_that_never_answers_ends_the_run_in_time_and_no_step_waits_for_it(
    told: Any, faults: Any, bucket: str
) -> None:
    faults.fail(r"PUT .*rank-00001.bin", "silence")
    arguments = ["--steps=40", "--checkpoint.every_steps=30", "--checkpoint.timeout_seconds=3"]
    arguments += [f"--checkpoint.location=s3://{bucket}/runs", "--checkpoint.most_failures=1"]
    started = time.monotonic()
    results, _ = told(2, {"silent": {"arguments": arguments, "pause": 0.05}})
    assert time.monotonic() - started < 30
    for result in results:
        assert "1 saves in a row failed, the last at step 30: rank 1: " in result["silent"]["error"]
        assert "rank-00001.bin" in result["silent"]["error"]
        assert result["silent"]["longest"] < 1.0


def test_ela_07_a_save_that_takes_longer_than_collectives_may_aborts_nothing(told: Any, faults: Any, bucket: str) -> None:
    faults.fail(r"PUT .*rank-00000.bin", "delay", seconds=4.0)
    arguments = ["--steps=4", "--checkpoint.every_steps=2", "--collective_timeout_seconds=1.5"]
    arguments += [f"--checkpoint.location=s3://{bucket}/slow"]
    results, _ = told(2, {"slow": {"arguments": arguments}})
    for result in results:
        assert "error" not in result["slow"]
        assert [step for name, step, _ in result["slow"]["events"] if name == "committed"] == [2, 4]


class Embedded(nn.Module):
    """The smallest model, with what each forward pass changes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(257))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.weight[tokens]


def a_loop(run: Run, model: nn.Module, *, momentum: float = 0.0) -> tuple[Any, Callable[[], None]]:
    """State, resumed, and a function that does one step."""
    data = run.tokens()
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum))
    state = run.state(model=prepared, optimizer=optimizer, data=data)
    state.resume()

    def step() -> None:
        for batch in data.micro_batches():
            run.backward(prepared(batch.inputs).sum())
        run.step(optimizer)

    return state, step


def test_a_save_is_of_its_step_whatever_comes_into_being_or_changes_beside_it(
    alone: Callable[..., Run], dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whatever lies in the folder that training runs in: its modules are not the writer's."""
    for name in ("json", "queue", "trainrun"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    copy = snapshot._copy
    monkeypatch.setattr(snapshot, "_copy", lambda pairs: (time.sleep(0.2), copy(pairs)))
    arguments = (f"--data={dataset}", "--steps=10", "--checkpoint.every_steps=1", f"--checkpoint.location={tmp_path / 'runs'}")
    run, model = alone(*arguments), Embedded()
    state, step = a_loop(run, model, momentum=0.9)
    state.save(now=True)  # before there is anything of the optimizer
    step()
    state.save()
    before = model_digest(model)
    step()  # changes a buffer at once, and the weight when it was copied
    state.wait()
    state.close()
    assert model_digest(model) != before
    resumed, fresh = alone(*arguments), Embedded()
    state, step = a_loop(resumed, fresh, momentum=0.9)
    assert (resumed.completed, model_digest(fresh)) == (1, before)
    state.close()
    step()
    assert commits(tmp_path / "runs") == [0, 1]
    moments = [name for shard in read_commit(open_store(str(tmp_path / "runs/run")), 1).shards for name in shard.tensors]
    assert "optimizer/weight/momentum_buffer" in moments


def test_memory_that_snapshots_would_not_find_is_an_error_with_numbers_before_the_first_step(
    alone: Callable[..., Run], dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = alone(f"--data={dataset}", "--steps=3", f"--checkpoint.location={tmp_path}")
    state, step = a_loop(run, Embedded())
    monkeypatch.setattr(arena, "free_memory", lambda: 500)
    with pytest.raises(ConfigError, match=r"Checkpoints need 0\.001\d* MB of main memory on .*a copy of the state of its 1 rank"):
        next(run.steps())
    step()  # and where less is left than there was then, the save fails
    with pytest.raises(
        CheckpointError, match=r"3 saves in a row failed.*rank 0: a snapshot takes .* of which 0\.0005 MB are free"
    ):
        state.save(now=True)
    assert "saving step 1 failed (1 of 3 in a row)" in capsys.readouterr().err
    state.close()


def test_writers_that_die_between_saves_are_replaced_and_leave_no_descriptors(
    alone: Callable[..., Run], dataset: str, tmp_path: Path
) -> None:
    run = alone(f"--data={dataset}", "--steps=9", f"--checkpoint.location={tmp_path}")
    state, step = a_loop(run, Embedded())
    before = None
    for _ in range(2):
        step()
        state.save(now=True)
        writer = state._saver._share._writer._process
        writer.kill()
        writer.wait()
        step()
        state.save(now=True)
        opened = descriptors()
        assert before is None or len(opened) <= len(before)
        before = opened
    state.close()
    assert len(descriptors()) <= len(opened) - 3  # of a socket, the arena and its mapping
    assert commits(tmp_path)[-3:] == [2, 3, 4]


def shared_memory() -> set[str]:
    """Names of shared memory, but for the semaphores of multiprocessing, which tests that run beside this one have too."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-")}


def descriptors() -> list[str]:
    gc.collect()  # or those of tests before go while this one counts
    return [path.name for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]


def test_nothing_the_writer_imports_is_torch() -> None:
    code = "import sys, trainrun.checkpoint.writer, trainrun.s3; sys.exit('torch' in sys.modules)"
    root = str(Path(share.__file__).parents[2])
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, check=False).returncode == 0


SCRIPT = """
import os, sys, time
import trainrun
from trainrun.checkpoint.process import WriterProcess
from trainrun.models.gpt import GPT
from trainrun.optimizer import adamw

started = WriterProcess.__init__
def told(self):
    started(self)
    print("writer", self.pid, flush=True)
WriterProcess.__init__ = told
run = trainrun.start()
data = run.tokens()
gpt = GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
model, optimizer = run.prepare(gpt, adamw(gpt, run.settings.optimizer))
state = run.state(model=model, optimizer=optimizer, data=data)
state.resume()
for step in run.steps():
    for batch in data.micro_batches():
        run.backward(model.loss(batch))
    run.step(optimizer)
    state.save()
    if step == 3 and sys.argv[-1] == "--log_every=1":
        raise KeyError("of the user's own")
    if step == 3 and sys.argv[-1] == "--log_every=2":
        sys.exit(9)
    if step == 3 and sys.argv[-1] == "--log_every=3":
        time.sleep(60)
"""


@pytest.mark.parametrize(("way", "code"), [("raise", 1), ("exit", 9), ("kill", -signal.SIGKILL)])
def test_data_10_however_a_rank_ends_in_the_midst_of_a_save_it_leaves_nothing_and_does_not_hang(
    faults: Any, bucket: str, tiny: list[str], dataset: str, tmp_path: Path, way: str, code: int
) -> None:
    """The store never answers; and where the rank is killed, its writer is even stopped."""
    faults.fail(r"PUT .*rank-00000.bin", "silence")
    (tmp_path / "train.py").write_text(SCRIPT)
    number = ("", "raise", "exit", "kill").index(way)
    arguments = [*tiny, f"--data={dataset}", "--steps=9", "--checkpoint.every_steps=2", f"--log_every={number}"]
    arguments.insert(0, f"--checkpoint.location=s3://{bucket}/runs")
    memory = shared_memory()
    root = str(Path(share.__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "train.py", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as rank:
        assert rank.stdout is not None
        writer = next(int(line.split()[1]) for line in rank.stdout if line.startswith("writer"))
        if way == "kill":
            while not faults.count(r"PUT .*rank-00000.bin"):
                time.sleep(0.05)
            os.kill(writer, signal.SIGSTOP)
            rank.kill()
        assert rank.wait(30) == code
    deadline = time.monotonic() + 5
    while Path(f"/proc/{writer}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{writer}").exists()
    assert shared_memory() <= memory
