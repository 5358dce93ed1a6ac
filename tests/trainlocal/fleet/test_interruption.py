"""A run that is interrupted, at whatever moment and however, leaves nothing behind but its logs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.leftovers import (
    assert_no_process_is_left,
    assert_nothing_is_left,
    namespaces,
    processes,
)
from trainlocal.fleet.tiers import TIERS


def wait_for_line(process, wanted):
    for line in process.stdout:
        if line.strip() == wanted:
            return
    raise AssertionError(f"never came to be {wanted}: {process.stderr.read()}")


def start_and_interrupt(runner, phase, number, more_seconds=0.0):
    """Wait for a phase and then some, send the signal to the starter alone, and see that it ends and nothing is left."""
    directory = runner.directory / "local"
    with runner.start("starter.py") as process:
        try:
            wait_for_line(process, phase)
            time.sleep(more_seconds)
            those = namespaces(processes(directory))
            os.kill(process.pid, number)  # what stands before the program in a runner's command becomes it by exec
            process.wait(30)
            assert_nothing_is_left(directory, those)
        finally:
            process.kill()
    return those


BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])


@BOTH
@pytest.mark.parametrize("seconds", [0.05, 0.4, 1.2])
def test_nothing_is_left_of_a_run_interrupted_while_it_starts(best_runner, seconds, number):
    start_and_interrupt(best_runner, "starting", number, more_seconds=seconds)


@BOTH
def test_nothing_is_left_of_a_run_interrupted_while_nodes_boot(best_runner, number):
    start_and_interrupt(best_runner, "booting", number)


@pytest.mark.parametrize("tier", TIERS)
def test_nothing_is_left_of_a_run_killed_while_nodes_run(make_runner, tier):
    runner = make_runner(tier)
    those = start_and_interrupt(runner, "running", signal.SIGKILL)
    assert tier == "plain" or len(those) > 10  # the search did find the namespaces of the fleet and two nodes


def test_no_process_is_left_when_the_janitor_itself_is_killed(best_runner):
    directory = best_runner.directory / "local"
    with best_runner.start("starter.py") as process:
        try:
            wait_for_line(process, "running")
            (janitor,) = (pid for pid, command in processes(directory).items() if b"trainlocal.janitor" in command)
            those = namespaces(processes(directory))
            os.kill(janitor, signal.SIGKILL)
        finally:
            process.kill()
    assert_no_process_is_left(directory, those)
    with best_runner.start("starter.py", "detach") as process:  # the next start clears away what it could not
        assert process.wait(60) == 0, process.stderr.read()
    assert _command(best_runner, "down").returncode == 0
    assert_nothing_is_left(directory, those)


def test_a_detached_cloud_stays_until_it_is_told_to_end(best_runner):
    directory = best_runner.directory / "local"
    with best_runner.start("starter.py", "detach") as process:
        assert process.wait(60) == 0, process.stderr.read()
    try:
        status = _command(best_runner, "status")
        assert status.returncode == 0 and best_runner.tier in status.stdout, status.stderr
        those = namespaces(processes(directory))
    finally:
        down = _command(best_runner, "down")
    assert down.returncode == 0, down.stderr
    assert_nothing_is_left(directory, those)
    assert "no local cloud is running" in _command(best_runner, "status").stderr


def _command(runner, name):
    directory = str(runner.directory / "local")
    command = [*runner.command, sys.executable, "-m", "trainlocal", name, "--directory", directory]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "local"), "HOME": str(runner.directory)}
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=60, check=False)
