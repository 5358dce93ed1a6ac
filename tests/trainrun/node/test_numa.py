"""Ranks on the processors near their GPUs: when torchrun is told, when mpirun's ranks are bound, and when nothing is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trainrun.config import ConfigError
from trainrun.node import numa
from trainrun.node.mpi_rank import VARIABLE, RankOrder
from trainrun.node.numa import Topology, bind, processors_of_ranks, read_topology
from trainrun.node.outcome import StepFailed
from trainrun.node.software import Software
from trainrun.spec import ClusterSpec, JobSpec

P4D = ClusterSpec(
    name="c",
    instance_type="p4d.24xlarge",
    nodes_min=1,
    nodes_desired=1,
    nodes_max=1,
    accelerator="nvidia",
    accelerators_per_node=8,
    processes_per_node=8,
)
TWO = Topology(
    {0: frozenset([*range(24), *range(48, 72)]), 1: frozenset([*range(24, 48), *range(72, 96)])}, (0, 0, 0, 0, 1, 1, 1, 1)
)
JOB = JobSpec(entry_point="train.py")


@pytest.fixture
def able(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with the processors of a p4d, with numactl, and with a torch that has the option. Returns the Python."""
    program = tmp_path / "numactl"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(numa, "allowed_processors", lambda: frozenset(range(96)))
    return Path(sys.executable)


def test_the_topology_is_the_kernels(tmp_path):
    for node, processors in ((0, "0-1,4"), (1, "2-3,5"), (2, "\n")):  # the last has memory alone
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(processors)
    for address, node in (("0000:a0:1d.0", 1), ("0000:10:1c.0", 0), ("0000:10:1d.0", -1)):
        device = tmp_path / "bus/pci/drivers/nvidia" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    (tmp_path / "bus/pci/drivers/nvidia/module").mkdir()
    found = read_topology(tmp_path)
    assert found == Topology({0: frozenset({0, 1, 4}), 1: frozenset({2, 3, 5})}, (0, -1, 1))
    assert read_topology(tmp_path / "none") == Topology({}, ())


def test_gpus_of_a_node_with_two_numa_nodes_are_bound_to_theirs(able):
    found = bind(JOB, P4D, software=Software(str(able)), topology=TWO)
    assert (found.way, found.why) == ("node", "2 NUMA nodes")
    assert [set(one) for one in found.processors] == [set(TWO.processors[0])] * 4 + [set(TWO.processors[1])] * 4
    assert bind(replace(JOB, numa="exclusive"), P4D, software=Software(str(able)), topology=TWO).way == "exclusive"


@pytest.mark.parametrize(
    ("job", "cluster", "topology", "why"),
    [
        (replace(JOB, numa="none"), P4D, TWO, "the job wants none"),
        (JOB, replace(P4D, accelerator="none", accelerators_per_node=0), TWO, "no GPUs to be near to"),
        (JOB, replace(P4D, accelerator="neuron"), TWO, "no GPUs to be near to"),
        (JOB, P4D, Topology({0: frozenset(range(96))}, (0,) * 8), "all processors are equally near"),
        (replace(JOB, numa="socket"), P4D, Topology({0: frozenset(range(96))}, (0,) * 8), "all processors are equally near"),
        (JOB, replace(P4D, processes_per_node=4), TWO, "there are 4 ranks for 8 GPUs"),
        (JOB, P4D, replace(TWO, gpus=(-1,) * 8), "the kernel does not say"),
        (JOB, P4D, replace(TWO, gpus=()), "the kernel does not say"),
    ],
)
def test_where_there_is_nothing_to_bind_nothing_is_bound(job, cluster, topology, why, able):
    found = bind(job, cluster, software=Software(str(able)), topology=topology)
    assert found.way == "" and not found.processors and found.why.startswith(why)


def test_what_torchrun_needs_and_lacks_is_said_and_stops_only_who_asked_for_it(able, monkeypatch, tmp_path):
    old = tmp_path / "site/torch"
    old.mkdir(parents=True)
    (old / "__init__.py").touch()  # a torch without the module that binds
    without_torch = Software(str(able))
    without_torch.environment = lambda base: {**base, "PYTHONPATH": str(old.parent)}
    without_numactl = Software(str(able))
    without_numactl.environment = lambda base: {**base, "PATH": str(tmp_path / "empty")}
    missing = Software(str(tmp_path / "none"))
    for software, lack in (
        (without_torch, "older than 2.9"),
        (without_numactl, "no numactl"),
        (missing, "could not be looked for"),
    ):
        assert lack in bind(JOB, P4D, software=software, topology=TWO).why
        with pytest.raises(StepFailed, match=rf"numa is 'node', but ranks cannot be bound: .*{lack}.* Leave numa out"):
            bind(replace(JOB, numa="node"), P4D, software=software, topology=TWO)
    assert bind(replace(JOB, launcher="mpirun"), P4D, software=missing, topology=TWO).way == "node"  # it needs none of it


def test_ranks_of_a_container_are_bound_by_what_starts_them_there(able):
    software = Software(str(able))
    software.sees_node = False
    assert bind(JOB, P4D, software=software, topology=TWO).way == "node"  # torchrun runs in the container, too
    assert bind(replace(JOB, launcher="mpirun"), P4D, software=software, topology=TWO).why.startswith("the container's runtime")


def test_the_agents_own_processors_are_respected():
    allowed = frozenset(range(20, 30))
    assert processors_of_ranks(replace(TWO, gpus=(0, 1, -1)), allowed=allowed) == [(20, 21, 22, 23), tuple(range(24, 30)), ()]


def test_torchrun_has_the_option_and_its_ways():
    from torch.distributed.run import get_args_parser

    (option,) = [action for action in get_args_parser()._actions if "--numa-binding" in action.option_strings]
    assert set(option.choices or ()) == {"node", "socket", "exclusive", "core-complex"}


def test_mpirun_takes_the_ways_that_its_ranks_can_go():
    with pytest.raises(ConfigError, match="numa is 'socket', but the launcher mpirun takes 'auto', 'none' or 'node'"):
        JobSpec(entry_point="train.py", launcher="mpirun", numa="socket")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no way to bind here")
def test_a_rank_of_mpirun_is_bound_before_its_program_starts(tmp_path):
    mine = sorted(os.sched_getaffinity(0))
    order = RankOrder(
        command=[sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"],
        working_directory=str(tmp_path),
        folder=str(tmp_path),
        processors=[mine, mine[-1:]],
    )
    for rank, wanted in ((0, mine), (1, mine[-1:])):
        numbers = {f"OMPI_COMM_WORLD_{name}": str(rank) for name in ("RANK", "LOCAL_RANK")}
        sizes = {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
        environment = {**os.environ, **numbers, **sizes, VARIABLE: order.to_text()}
        subprocess.run([sys.executable, "-m", "trainrun.node.mpi_rank"], env=environment, check=True)
        assert json.loads((tmp_path / str(rank) / "stdout.log").read_text()) == wanted
