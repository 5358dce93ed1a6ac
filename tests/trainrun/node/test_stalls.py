"""Ranks that hang: found by their own progress, with what each of them was doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainrun import progress, stacks
from trainrun.directory import DirectoryStore
from trainrun.node.dumps import Dump, dump_ranks
from trainrun.node.stalls import LONGER, Stalls
from trainrun.progress import ProgressFile


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def stalls_of(tmp_path, clock):
    def make(*dumps: Dump, no_progress: float = 100) -> Stalls:
        store = DirectoryStore(tmp_path / "run")
        return Stalls(state=tmp_path, store=store, node="i-1", no_progress=no_progress, dump=lambda _: list(dumps), clock=clock)

    return make


def test_no_step_for_the_time_allowed_is_a_hang_and_is_told_once(stalls_of, clock, tmp_path):
    stalls = stalls_of(Dump(rank=3, pid=7, state="S", text="stack of 3"), Dump(rank=4, pid=8, state="T", text="stack of 4"))
    three, four = ProgressFile(tmp_path, 3), ProgressFile(tmp_path, 4)
    three.write("training", step=9, arrived=10)
    four.write("training", step=9)
    for moment in (0, 99.9):
        clock.now = moment
        stalls.look()
        assert stalls.reason == ""
    clock.now = 100.1
    stalls.look()
    assert stalls.reason == (
        "Ranks 3, 4 made no progress for 100 s at step 10 (timeouts.no_progress is 100). "
        "Rank 4 (process 8) is stopped by a signal (SIGSTOP, or a debugger). "
        "What each rank was doing is in failures/i-1/ of the run's folder."
    )
    sent = {item.key: (tmp_path / "run" / item.key).read_text() for item in DirectoryStore(tmp_path / "run").list()}
    assert sorted(sent.values()) == ["stack of 3", "stack of 4"]
    assert all(key.startswith("failures/i-1/") for key in sent)


def test_the_rank_that_others_wait_for_is_named(stalls_of, clock, tmp_path):
    stalls = stalls_of()
    for rank in range(3):
        ProgressFile(tmp_path, rank).write("training", step=9, arrived=9 if rank == 1 else 10)
    stalls.look()
    clock.now = 101
    stalls.look()
    assert "Rank 1 did not come to where the others of this node wait." in stalls.reason


def test_each_step_begins_the_time_anew(stalls_of, clock, tmp_path):
    stalls, file = stalls_of(), ProgressFile(tmp_path, 0)
    for step in range(1, 20):
        file.write("training", step=step)
        clock.now += 90
        stalls.look()
    assert stalls.reason == ""


@pytest.mark.parametrize(("phase", "allowed"), [("starting", LONGER), ("between", LONGER), ("ended", LONGER), ("training", 1.0)])
def test_what_takes_long_by_its_nature_may_take_longer(stalls_of, clock, tmp_path, phase, allowed):
    stalls = stalls_of()
    ProgressFile(tmp_path, 0).write(phase, step=5)
    stalls.look()
    clock.now = 100 * allowed - 1
    stalls.look()
    assert stalls.reason == ""
    clock.now += 2
    stalls.look()
    assert f"no progress for {100 * allowed:g} s" in stalls.reason


def test_a_hang_is_told_also_where_nothing_can_be_kept(stalls_of, clock, tmp_path):
    stalls = stalls_of(Dump(rank=0, pid=7, state="S", text="stack"))
    (tmp_path / "failures").write_text("in the way")
    ProgressFile(tmp_path, 0).write("training", step=5)
    stalls.look()
    clock.now = 101
    stalls.look()
    assert stalls.reason.startswith("Rank 0 made no progress for 100 s at step 6")


def test_a_process_that_is_stopped_may_not_take_longer(stalls_of, clock, tmp_path):
    stalls = stalls_of()
    stalls._state_of = lambda pid: "T"
    ProgressFile(tmp_path, 0).write("between", step=5)
    stalls.look()
    clock.now = 101
    stalls.look()
    assert stalls.reason.startswith("Rank 0 made no progress for 100 s after step 5")


def test_ranks_that_never_told_do_not_hang(stalls_of, clock, tmp_path):
    stalls = stalls_of()
    (tmp_path / progress.FOLDER).mkdir()
    (tmp_path / progress.FOLDER / "1").write_bytes(b"half")
    stalls.look()
    clock.now = 1e6
    stalls.look()
    assert stalls.reason == ""


def test_zero_never_looks(stalls_of, clock, tmp_path):
    stalls = stalls_of(no_progress=0)
    ProgressFile(tmp_path, 0).write("training", step=5)
    stalls.look()
    clock.now = 1e6
    stalls.look()
    assert stalls.reason == ""


RANK = """
import os, pathlib, time
from trainrun.pulse import Pulse
pulse = Pulse(pathlib.Path(os.environ["TRAINRUN_STATE"]), int(os.environ["RANK"]))
def waits_for_its_peers():
    pulse.begin(1)
    time.sleep(60)
waits_for_its_peers()
"""
OTHERS = "import time; print(flush=True); time.sleep(60)"


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at through /proc")
def test_real_ranks_tell_their_stacks_and_who_cannot_is_told_why(tmp_path):
    def rank(number: int, code: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "RANK": str(number), "LOCAL_RANK": str(number), "TRAINRUN_STATE": str(tmp_path)}
        return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)

    ranks = [rank(100, RANK), rank(101, RANK), rank(102, OTHERS)]
    try:
        deadline = time.monotonic() + 30
        while len([one for one in progress.read(tmp_path) if one.phase == "starting" and one.step == 0]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for number in (100, 101):
            while not (tmp_path / stacks.FOLDER / str(number)).exists():
                time.sleep(0.05)
        assert ranks[2].stdout is not None
        ranks[2].stdout.readline()
        time.sleep(0.3)
        ranks[1].send_signal(signal.SIGSTOP)
        dumps = {dump.rank: dump for dump in dump_ranks(tmp_path) if dump.rank in (100, 101, 102)}
        assert "waits_for_its_peers" in dumps[100].text
        assert dumps[100].explains == ""
        assert dumps[101].explains.startswith("stopped by a signal")
        assert "waits_for_its_peers" not in dumps[101].text
        assert "did not tell its stacks" in dumps[102].text
        assert ranks[2].poll() is None, "a rank that does not know the signal would have died of it"
    finally:
        for one in ranks:
            one.kill()
            one.wait()


def test_a_loop_of_ones_own_takes_part_by_a_call_a_step(tmp_path):
    code = "from trainrun.progress import note\nfor step in (1, 2, 3): note(step, own_seconds=0.5)"
    environment = {**os.environ, "RANK": "5", "TRAINRUN_STATE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    (told,) = progress.read(tmp_path)
    assert (told.rank, told.step, told.phase, told.own_seconds) == (5, 3, "training", 0.5)
    progress.clear(tmp_path)
    assert progress.read(tmp_path) == []


def test_without_a_node_agent_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("TRAINRUN_STATE", raising=False)
    monkeypatch.chdir(tmp_path)
    progress.note(1)
    assert list(Path().iterdir()) == []
