"""What a run may have left behind on this machine: processes, namespaces, mounts, control groups, files."""

import os
import subprocess
import sys
import time
from pathlib import Path

from trainlocal.fleet import cgroups
from trainlocal.fleet.places import Places

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
    return [str(group) for group in groups if not cgroups.is_alive(int(group.name.rpartition("-")[2]))]


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
