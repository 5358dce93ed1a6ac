"""One rank under mpirun: what its program gets, how its end is noted, and what is made of all ranks' ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainrun.node.mpi_rank import VARIABLE, RankOrder
from trainrun.node.mpi_ranks import MpiRanks

TRAINING = Path(__file__).resolve().parents[3] / "training"


@pytest.fixture
def start_rank(tmp_path):
    """Starts the program of a rank as Open MPI would: `sh -c TEXT`, or a command."""
    started = []

    def start(command, *, local_rank=0):
        order = RankOrder(
            command=command if isinstance(command, list) else ["/bin/sh", "-c", command],
            working_directory=str(tmp_path),
            folder=str(tmp_path / "ranks"),
        )
        environment = {
            **os.environ,
            "PYTHONPATH": str(TRAINING),
            VARIABLE: order.to_text(),
            "OMPI_COMM_WORLD_RANK": "5",
            "OMPI_COMM_WORLD_SIZE": "8",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            "MASTER_ADDR": "10.0.0.7",
        }
        process = subprocess.Popen([sys.executable, "-m", "trainrun.node.mpi_rank"], env=environment)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def ranks(tmp_path):
    return MpiRanks(folder=tmp_path / "ranks", count=2)


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


def test_a_rank_gets_torchruns_variables_and_its_logs_lie_where_torchruns_do(start_rank, ranks, tmp_path):
    program = "import json, os, sys; print(json.dumps([dict(os.environ), os.getcwd()])); print('words', file=sys.stderr)"
    assert start_rank([sys.executable, "-c", program], local_rank=1).wait(timeout=60) == 0
    environment, folder = json.loads((tmp_path / "ranks/1/stdout.log").read_text())
    wanted = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.7"}
    assert {name: environment[name] for name in wanted} == wanted
    assert VARIABLE not in environment
    assert folder == str(tmp_path)
    assert (tmp_path / "ranks/1/stderr.log").read_text() == "words\n"
    assert ranks.exit_codes() == [0]
    assert not ranks.all_ended()  # of two ranks


@pytest.mark.parametrize(("ends", "seen", "noted"), [("exit 75", 0, 75), ("exit 3", 3, 3), ("kill -9 $$", 137, -9)])
def test_open_mpi_sees_a_failure_but_not_a_rank_that_saved_and_left(start_rank, ranks, ends, seen, noted):
    assert start_rank(ends).wait(timeout=60) == seen
    assert ranks.exit_codes() == [noted]


def test_a_program_that_is_not_there_is_explained(start_rank, ranks):
    assert start_rank(["/nonexistent/program"]).wait(timeout=60) == 127
    assert "/nonexistent/program cannot be run: " in ranks.explanation()


def test_a_stop_reaches_the_program_once_and_is_repeated_for_ranks_that_come_later(start_rank, ranks, tmp_path):
    patient = "trap 'echo asked >> asked' TERM; touch ready; while [ ! -e end ]; do sleep 0.05; done; exit 75"
    first = start_rank(patient)
    wait_for(tmp_path / "ready")
    wait_for(tmp_path / "ranks/0/pid")
    for _ in range(3):
        ranks.ask_to_stop()
    wait_for(tmp_path / "asked")
    (tmp_path / "ready").unlink()
    second = start_rank("touch ready; exec sleep 60", local_rank=1)
    wait_for(tmp_path / "ranks/1/pid")
    wait_for(tmp_path / "ready")
    ranks.ask_to_stop()
    assert second.wait(timeout=60) == 128 + signal.SIGTERM
    (tmp_path / "end").touch()
    assert first.wait(timeout=60) == 0
    assert (tmp_path / "asked").read_text() == "asked\n"
    assert sorted(ranks.exit_codes()) == [-signal.SIGTERM, 75]
    assert ranks.all_ended()
    assert ranks.explanation() == ""  # neither failed by itself


def test_the_rank_that_failed_first_explains_the_others(ranks, tmp_path):
    for number, (code, said) in enumerate([(1, "the peer is gone"), (2, "the disk is full"), (-15, "ended")]):
        folder = tmp_path / "ranks" / str(number)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(f"{said}\n")
        (folder / "stdout.log").touch()
        (folder / "exit_code").write_text(str(code))
        os.utime(folder / "exit_code", times=(100 - number, 100 - number))
    assert ranks.explanation() == "the disk is full"
