"""Faults for exercise, made on a node by hand or by ``traincluster chaos``: what breaks here anyway breaks at a chosen time.

Each is what its name says and nothing more: nothing here fakes the consequence. What is temporary is undone by a process of its
own, so that it ends even when the way to the node is what was cut.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from trainrun.node.commands import run
from trainrun.node.files import write_whole
from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.node.processes import ranks_below

METADATA_ADDRESS = "169.254.169.254"
FILL_LIMIT = 1536 * 2**20
"""Bytes that are written into a file system in memory at most: it is the machine's memory that is filled."""
LEFT_FREE = 2**20
"""Bytes that a full disk has left: none would be no different, and some programs cannot even be ended then."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault."""

    summary: str
    make: Callable[[Places, float], str]
    """Makes it for so many seconds, where it is temporary. Returns what was done."""
    temporary: bool = False
    of_machine: bool = False
    """Whether it would hit the whole machine, of which a node that is a plain process is only a part."""


def make(name: str, *, places: Places, seconds: float) -> str:
    """Make a fault and say what was done.

    Args:
        name: of `FAULTS`.
        places: of this node.
        seconds: after which a temporary fault is undone.

    Raises:
        StepFailed: it cannot be made here.
    """
    fault = FAULTS[name]
    if fault.of_machine and places.root != Path("/"):
        raise StepFailed(f"{name} would hit the machine, not only this node, which is a plain process on it.")
    return fault.make(places, seconds)


def _kill_worker(places: Places, seconds: float) -> str:
    pid = random.choice(_ranks(places))
    os.kill(pid, signal.SIGKILL)
    return f"killed the rank with process {pid}"


def _stop_rank(places: Places, seconds: float) -> str:
    pid = random.choice(_ranks(places))
    os.kill(pid, signal.SIGSTOP)
    if not seconds:
        return f"stopped the rank with process {pid} for good"
    _later(seconds, f"kill -CONT {pid}")
    return f"stopped the rank with process {pid}, to go on after {seconds:g} s"


def _kill_agent(places: Places, seconds: float) -> str:
    agents = [pid for pid, words in _commands(places) if words[1:4] == ["-m", "trainrun.node", "run"]]
    if not agents:
        raise StepFailed("The node agent does not run here.")
    for pid in agents:
        os.kill(pid, signal.SIGKILL)
    return f"killed the node agent, process {agents[0]}"


def _spot_notice(places: Places, seconds: float) -> str:
    at = datetime.now(timezone.utc) + timedelta(seconds=seconds or 120.0)
    return _drill(places, "spot/instance-action", json.dumps({"action": "terminate", "time": f"{at:%Y-%m-%dT%H:%M:%SZ}"}))


def _rebalance(places: Places, seconds: float) -> str:
    notice = json.dumps({"noticeTime": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"})
    return _drill(places, "events/recommendations/rebalance", notice)


def _maintenance(places: Places, seconds: float) -> str:
    at = datetime.now(timezone.utc) + timedelta(seconds=seconds)
    event = {
        "NotBefore": f"{at:%-d %b %Y %H:%M:%S GMT}",
        "Code": "instance-retirement",
        "Description": "The instance is to be retired, for exercise",
        "EventId": "instance-event-drill",
        "State": "active",
    }
    return _drill(places, "events/maintenance/scheduled", json.dumps([event]))


def _drill(places: Places, item: str, text: str) -> str:
    file = places.drills / item
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, text)
    return f"had the node told by its metadata item {item}: {text}"


def _cut_link(places: Places, seconds: float) -> str:
    interface = run("ip", "-o", "route", "show", "default").split(" dev ")[1].split()[0]
    _later(seconds, f"tc qdisc del dev {interface} root")
    run("tc", "qdisc", "replace", "dev", interface, "root", "blackhole")  # nothing that is sent leaves, and nobody is told
    return f"nothing that this node sends leaves it for {seconds:g} s ({interface})"


def _metadata(places: Places, seconds: float) -> str:
    address = f"{METADATA_ADDRESS}/32"
    if f"inet {address}" in run("ip", "-o", "-4", "address", "show", "dev", "lo"):  # a node of the local cloud
        _later(seconds, f"ip address add {address} dev lo")
        run("ip", "address", "del", address, "dev", "lo")
    else:
        _later(seconds, f"ip route del blackhole {address}")
        run("ip", "route", "add", "blackhole", address)
    return f"the metadata service cannot be reached for {seconds:g} s"


def _fill_disk(places: Places, seconds: float) -> str:
    free = shutil.disk_usage(places.state).free - LEFT_FREE
    kind = run("stat", "--file-system", "--format=%T", str(places.state)).strip()
    if kind == "tmpfs" and free > FILL_LIMIT:
        raise StepFailed(
            f"{places.state} is in memory and has {free:,} bytes free; more than {FILL_LIMIT:,} would fill the machine."
        )
    filling = places.state / "filling"
    _later(seconds, f"rm -f {filling}")
    with filling.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, free))
    return f"filled {places.state} with {free:,} bytes, to be removed after {seconds:g} s"


FAULTS = {
    "kill-worker": Fault(summary="SIGKILL to one rank", make=_kill_worker),
    "kill-agent": Fault(summary="SIGKILL to the node agent", make=_kill_agent),
    "stop-rank": Fault(summary="SIGSTOP to one rank (0 seconds: for good)", make=_stop_rank, temporary=True),
    "cut-link": Fault(summary="nothing that the node sends arrives", make=_cut_link, temporary=True, of_machine=True),
    "metadata": Fault(summary="the metadata service is out of reach", make=_metadata, temporary=True, of_machine=True),
    "fill-disk": Fault(summary="the disk of the node's state is full", make=_fill_disk, temporary=True, of_machine=True),
    "spot-notice": Fault(summary="a spot interruption notice", make=_spot_notice),
    "rebalance": Fault(summary="a rebalance recommendation", make=_rebalance),
    "maintenance": Fault(summary="a scheduled event that retires the instance", make=_maintenance),
}
"""What can be done on a node, by name."""


def _ranks(places: Places) -> list[int]:
    wanted = f"TRAINRUN_STATE={places.state}".encode()
    ranks = [pid for pid in ranks_below(1) if wanted in _read(pid, "environ").split(b"\0")]
    if not ranks:
        raise StepFailed("No rank runs on this node at the moment.")
    return ranks


def _commands(places: Places) -> Iterator[tuple[int, list[str]]]:
    """The command lines of this node's processes."""
    root = f"TRAINCLUSTER_ROOT={places.root}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        if places.root == Path("/") or root in _read(pid, "environ").split(b"\0"):
            yield pid, _read(pid, "cmdline").decode(errors="replace").split("\0")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _later(seconds: float, command: str) -> None:
    """Have a command run after some time, by a process that outlives this one and the agent."""
    program = f"import time, subprocess; time.sleep({seconds!r}); subprocess.call({command!r}, shell=True)"
    subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
