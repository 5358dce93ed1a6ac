"""A run that is interrupted, at whatever moment and however, leaves nothing behind but its logs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainlocal.fleet import cgroups
from trainlocal.fleet.places import Places
from trainlocal.fleet.tiers import TIERS

LINUX = sys.platform == "linux"


def processes(directory):
    """pid -> command line of all processes that have to do with the directory, by command, environment or mounts."""
    mark, found = str(directory).encode(), {}
    if not LINUX:
        listing = subprocess.run(["ps", "-axEww", "-o", "pid=,command="], capture_output=True, check=True).stdout
        return {int(line.split()[0]): line for line in listing.splitlines() if mark in line and b"ps -axEww" not in line}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            if any(mark in text for text in (command, (folder / "environ").read_bytes(), (folder / "mountinfo").read_bytes())):
                found[int(folder.name)] = command
        except OSError:
            continue  # gone meanwhile
    found.pop(os.getpid(), None)
    return found


def namespaces(pids):
    """The namespaces of processes that are not our own."""
    found = {pid: _namespaces_of(pid) for pid in pids if LINUX}
    return set().union(*found.values()) - _namespaces_of("self")


def _namespaces_of(pid):
    try:
        return {str(link.readlink()) for link in Path(f"/proc/{pid}/ns").glob("*")}
    except OSError:
        return set()  # gone meanwhile


def abandoned_cgroups():
    """Groups of janitors that are no more."""
    try:
        groups = cgroups.own_group().glob("trainlocal-[0-9]*")
    except OSError:
        return []
    return [str(group) for group in groups if not Path(f"/proc/{group.name.rpartition('-')[2]}").exists()]


def left_files(directory):
    """Files that are neither logs nor the folders which hold them."""
    kept = (Places(directory).logs, Places(directory).nodes)
    return [str(path) for path in directory.rglob("*") if not any(path == top or top in path.parents for top in kept)]


def everyone():
    return {int(folder.name) for folder in Path("/proc").glob("[0-9]*")} if LINUX else set()


def assert_no_process_is_left(directory, those_namespaces, seconds=20):
    """Wait until the processes are gone, and with them their namespaces and mounts."""
    deadline = time.monotonic() + seconds
    while left := processes(directory):
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.05)
    assert not namespaces(everyone()) & those_namespaces, "namespaces are left"
    assert str(directory) not in (Path("/proc/self/mountinfo").read_text() if LINUX else ""), "mounts are left"


def assert_nothing_is_left(directory, those_namespaces):
    """No process, namespace, mount, control group, or file that is not a log."""
    assert_no_process_is_left(directory, those_namespaces)
    assert left_files(directory) == []
    assert abandoned_cgroups() == []


def wait_for_line(process, wanted):
    for line in process.stdout:
        if line.strip() == wanted:
            return
    raise AssertionError(f"never came to be {wanted}: {process.stderr.read()}")


def interrupt(process, directory, number):
    """Send the signal to the starter alone, as `kill` would; see that it ends and that nothing is left."""
    those = namespaces(processes(directory))
    os.kill(_starter(process), number)
    process.wait(30)
    assert_nothing_is_left(directory, those)
    process.stdout.close()
    process.stderr.close()


def _starter(process):
    return process.pid  # the prefix commands of a Runner all become the program by exec


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
