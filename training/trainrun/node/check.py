"""Check that the node has what the job was promised, before its peers wait for it."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from trainrun.node.events import Events
from trainrun.node.fabric import check_fabric
from trainrun.node.mpi_program import find_mpirun
from trainrun.node.outcome import StepFailed
from trainrun.spec import ClusterSpec, JobSpec, RunSpec
from trainrun.store import Store, StoreError

PYTHON_SECONDS = 300.0
"""The first import of torch reads gigabytes from a volume that is still being fetched from S3."""
STORE_SECONDS = 60.0
"""Credentials and endpoints of a fresh instance may need some seconds to work."""


def check(*, spec: RunSpec, python: str, store: Store, events: Events) -> str:
    """Check everything, so that all faults are reported together. Returns what was found.

    Raises:
        StepFailed: what was seen, what was expected, what to do; one sentence a fault.
    """
    found, faults = [], []
    checks: list[Callable[[], str]] = [
        lambda: check_fabric(spec.cluster),
        lambda: check_accelerators(spec.cluster),
        lambda: check_efa(spec.cluster),
        lambda: check_python(python) if needs_torch(spec.job) else "no torch needed",
        lambda: check_launcher(spec.job, python=python),
        lambda: check_store(store, events),
    ]
    for one in checks:
        try:
            found.append(one())
        except StepFailed as fault:
            faults.append(str(fault))
    if faults:
        raise StepFailed("\n".join(faults))
    return ", ".join(found)


def check_accelerators(cluster: ClusterSpec, *, devices: Path = Path("/dev")) -> str:
    """Count the accelerators; on a CPU node nothing is looked for.

    Raises:
        StepFailed: another number than the instance type has.
    """
    if cluster.accelerator == "none":
        return "no accelerators expected"
    if cluster.accelerator == "nvidia":
        listing = _output_of("nvidia-smi", "-L")
        seen = len(re.findall(r"^GPU \d+:", listing, flags=re.MULTILINE))
        source, hint = f"nvidia-smi -L shows ({listing.strip() or 'nothing'})", "See dmesg for NVRM and Xid lines"
    else:
        seen = len([d for d in devices.glob("neuron*") if re.fullmatch(r"neuron\d+", d.name)])
        source, hint = "/dev/neuron* shows", "See dmesg for neuron lines, and whether the image has the Neuron driver"
    if seen != cluster.accelerators_per_node:
        raise StepFailed(
            f"{source} {seen} accelerators, {cluster.instance_type} has {cluster.accelerators_per_node}. "
            f"{hint}; replace the instance if a reboot does not bring them back."
        )
    return f"{seen} accelerators"


def check_efa(cluster: ClusterSpec, *, infiniband: Path = Path("/sys/class/infiniband")) -> str:
    """Count the EFA interfaces: the kernel's, and where that shows none, libfabric's.

    Raises:
        StepFailed: fewer than the RunSpec says.
    """
    if not cluster.efa_interfaces:
        return "no EFA expected"
    seen = len(list(infiniband.iterdir())) if infiniband.is_dir() else 0
    if not seen:
        listing = _output_of("/opt/amazon/efa/bin/fi_info", "-p", "efa", "-t", "FI_EP_RDM")
        seen = len(set(re.findall(r"^\s*domain:\s*(\S+)", listing, flags=re.MULTILINE)))
    if seen != cluster.efa_interfaces:
        raise StepFailed(
            f"{infiniband} and fi_info show {seen} EFA interfaces, the launch template asks for {cluster.efa_interfaces}. "
            "Is the EFA driver of the image loaded (lsmod | grep efa), and does the image support the instance type?"
        )
    return f"{seen} EFA interfaces"


def check_python(python: str) -> str:
    """Import torch in the job's Python.

    Raises:
        StepFailed: no such Python, or torch cannot be imported.
    """
    command = [python, "-c", "import torch; print(torch.__version__)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PYTHON_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StepFailed(f"{python} cannot be run: {error}. Set the job's python to the image's Python that has torch.") from None
    if done.returncode:
        lines = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise StepFailed(f"{python} cannot import torch:\n{lines}\nSet the job's python to the image's Python that has torch.")
    return f"torch {done.stdout.strip()}"


def needs_torch(job: JobSpec) -> bool:
    """Whether the job's Python has to have torch: mpirun starts programs without any Python."""
    return job.launcher == "torchrun" or not job.is_program


def check_launcher(job: JobSpec, *, python: str) -> str:
    """Find mpirun, where that is the launcher; torchrun is a part of torch.

    Raises:
        StepFailed: there is none.
    """
    if job.launcher == "torchrun":
        return "torchrun"
    mpirun = find_mpirun(job, python=python, environment=os.environ)
    return f"Open MPI {mpirun.version} ({mpirun.program})"


def check_store(store: Store, events: Events, *, timeout: float = STORE_SECONDS) -> str:
    """Write this node's events to the run's folder and read them back.

    Raises:
        StepFailed: not possible within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            events.send()
            store.get(events.key)
        except StoreError as error:
            if time.monotonic() > deadline:
                raise StepFailed(
                    f"{store.url} cannot be written and read: {error} "
                    "Do the bucket and its key exist, does the instance's role allow it, is there a way to S3?"
                ) from None
            time.sleep(2.0)
        else:
            return f"{store.url} can be written"


def _output_of(*command: str) -> str:
    """What a command prints; empty when it cannot be run or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
