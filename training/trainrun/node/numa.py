"""Ranks on the processors that are next to their GPU: memory of the other socket is farther away.

torchrun binds by its own option --numa-binding (torch 2.9 and later), by numactl; under mpirun the program that becomes each
rank does it itself. Both go by local rank i having GPU i, and both read from the kernel which NUMA node a GPU is at.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from trainrun.node.outcome import StepFailed
from trainrun.node.software import Software
from trainrun.spec import ClusterSpec, JobSpec

_PROBE = """\
import importlib.util, pathlib, shutil
torch = importlib.util.find_spec("torch")
if torch is None or not pathlib.Path(torch.submodule_search_locations[0], "numa", "binding.py").exists():
    print("the job's torch is older than 2.9, whose torchrun has no --numa-binding")
elif not shutil.which("numactl"):
    print("there is no numactl, by which torchrun binds")
"""
"""Run where the job runs, which may be a container. Without importing torch, which takes seconds."""


@dataclass(frozen=True)
class Topology:
    """What the kernel says of NUMA nodes and GPUs."""

    processors: dict[int, frozenset[int]]
    """Of each NUMA node that has any."""
    gpus: tuple[int, ...]
    """The NUMA node of each GPU, in the order of their PCI addresses, which is CUDA's for equal GPUs; -1 when unknown."""


def read_topology(sys: Path = Path("/sys")) -> Topology:
    """Ask the kernel."""
    processors = {
        int(folder.name[4:]): found
        for folder in sorted((sys / "devices/system/node").glob("node[0-9]*"))
        if (found := _numbers((folder / "cpulist").read_text(encoding="ascii")))
    }
    devices = sorted((sys / "bus/pci/drivers/nvidia").glob("*:*:*.*"))
    return Topology(processors, tuple(int((device / "numa_node").read_text(encoding="ascii")) for device in devices))


@dataclass(frozen=True, kw_only=True)
class Binding:
    """How the ranks of this node are bound."""

    way: str = ""
    """What torchrun is told; "" for not at all."""
    why: str = ""
    processors: tuple[tuple[int, ...], ...] = ()
    """Those that each rank may use under mpirun; none means all."""

    def __str__(self) -> str:
        return (
            f"ranks bound to processors by {self.way} ({self.why})" if self.way else f"ranks not bound to processors ({self.why})"
        )


def bind(job: JobSpec, cluster: ClusterSpec, *, software: Software, topology: Topology | None = None) -> Binding:
    """Decide how ranks are bound.

    Args:
        job: what runs; its ``numa`` says what is wanted.
        cluster: what a node has.
        software: what the job runs with.
        topology: what the kernel says; None asks it.

    Raises:
        StepFailed: a way that the job asks for by name cannot be gone on this node.
    """
    if job.numa == "none":
        return Binding(why="the job wants none")
    if cluster.accelerator != "nvidia":
        return Binding(why="no GPUs to be near to")
    topology = topology or read_topology()
    if len(topology.processors) < 2:
        return Binding(why="all processors are equally near")
    near = processors_of_ranks(topology, allowed=allowed_processors())
    obstacle = _obstacle(job, cluster, software=software, near=near)
    if obstacle and job.numa != "auto":
        raise StepFailed(f"numa is {job.numa!r}, but ranks cannot be bound: {obstacle}. Leave numa out to train without.")
    if obstacle:
        return Binding(why=obstacle)
    way = "node" if job.numa == "auto" else job.numa
    return Binding(way=way, why=f"{len(topology.processors)} NUMA nodes", processors=tuple(near))


def processors_of_ranks(topology: Topology, *, allowed: frozenset[int]) -> list[tuple[int, ...]]:
    """The processors at each GPU, as far as this process may use them; none where the kernel does not say where a GPU is."""
    return [tuple(sorted(topology.processors.get(node, frozenset()) & allowed)) for node in topology.gpus]


def allowed_processors() -> frozenset[int]:
    """Those that this process may use."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def _obstacle(job: JobSpec, cluster: ClusterSpec, *, software: Software, near: list[tuple[int, ...]]) -> str:
    """Why ranks cannot be bound; "" when they can."""
    if cluster.processes_per_node != cluster.accelerators_per_node:
        return f"there are {cluster.processes_per_node} ranks for {cluster.accelerators_per_node} GPUs"
    if len(near) != cluster.accelerators_per_node or not all(near):  # torchrun would take NUMA node 0 for such a GPU
        return "the kernel does not say which processors each GPU is at, or the agent may not use them"
    if job.launcher == "torchrun":
        return _probe(software)
    return "" if software.sees_node else "the container's runtime starts the ranks, not mpirun"


def _probe(software: Software) -> str:
    """What torchrun needs and lacks."""
    environment = software.environment(os.environ)
    command = software.command([software.python, "-c", _PROBE], environment)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"what torchrun needs for it could not be looked for ({error})"
    return done.stdout.strip()


def _numbers(ranges: str) -> frozenset[int]:
    """The numbers of a list of the kernel's, such as "0-23,48-71"."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", ranges):
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
