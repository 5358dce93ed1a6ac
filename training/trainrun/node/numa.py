"""Ranks on the processors that are next to their GPU: memory of the other socket is farther away.

torchrun binds by its own option --numa-binding (torch 2.9 and later), by numactl; under mpirun the program that becomes each
rank does it itself. Both go by local rank i having GPU i, and both read from the kernel which NUMA node a GPU is at.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from trainrun.node.outcome import StepFailed
from trainrun.spec import ClusterSpec, JobSpec

_FINDS_TORCH = """\
import importlib.util, pathlib
torch = importlib.util.find_spec("torch")
print(torch is not None and pathlib.Path(torch.submodule_search_locations[0], "numa", "binding.py").exists())
"""
"""Without importing torch, which takes seconds."""


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


def binding(job: JobSpec, cluster: ClusterSpec, *, python: str, topology: Topology) -> tuple[str, str]:
    """How ranks are to be bound: the way ("" for not at all), and why.

    Args:
        job: what runs; its ``numa`` says what is wanted.
        cluster: what a node has.
        python: the job's Python.
        topology: what the kernel says.

    Raises:
        StepFailed: a way that the job asks for by name cannot be gone on this node.
    """
    if job.numa == "none":
        return "", "the job wants no binding"
    if cluster.accelerator != "nvidia":
        return "", "no GPUs to be near to"
    if len(topology.processors) < 2:
        return "", "all processors are equally near"
    obstacle = _obstacle(job, cluster, python=python, topology=topology)
    if obstacle and job.numa != "auto":
        raise StepFailed(f"numa is {job.numa!r}, but ranks cannot be bound: {obstacle}. Leave numa out to train without.")
    if obstacle:
        return "", obstacle
    return ("node" if job.numa == "auto" else job.numa), f"{len(topology.processors)} NUMA nodes"


def processors_of_ranks(topology: Topology, *, allowed: frozenset[int]) -> list[list[int]]:
    """The processors at each GPU, as far as this process may use them."""
    return [sorted(topology.processors[node] & allowed) for node in topology.gpus]


def allowed_processors() -> frozenset[int]:
    """Those that this process may use."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def _obstacle(job: JobSpec, cluster: ClusterSpec, *, python: str, topology: Topology) -> str:
    """Why ranks cannot be bound; "" when they can."""
    if cluster.processes_per_node != cluster.accelerators_per_node:
        return f"there are {cluster.processes_per_node} ranks for {cluster.accelerators_per_node} GPUs"
    if len(topology.gpus) != cluster.accelerators_per_node or not set(topology.gpus) <= set(topology.processors):
        return "the kernel does not say which processors each GPU is at"  # torchrun would take NUMA node 0 for all
    if not all(processors_of_ranks(topology, allowed=allowed_processors())):
        return "the agent may not use any of the processors at some GPU"
    if job.launcher == "mpirun":
        return ""
    if not shutil.which("numactl"):
        return "the image has no numactl, by which torchrun binds"
    if not _torch_can_bind(python):
        return "the job's torch is older than 2.9, whose torchrun has no --numa-binding"
    return ""


def _torch_can_bind(python: str) -> bool:
    try:
        done = subprocess.run([python, "-c", _FINDS_TORCH], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() == "True"


def _numbers(ranges: str) -> frozenset[int]:
    """The numbers of a list of the kernel's, such as "0-23,48-71"."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", ranges):
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
