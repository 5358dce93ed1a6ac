"""The job's Python: does it have torch, of versions that go with the driver and the instance type, and can it compute?"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainrun.node.checks import torch_program
from trainrun.node.checks.versions import torch_problems
from trainrun.node.outcome import StepFailed
from trainrun.node.software import Software
from trainrun.spec import ClusterSpec, JobSpec
from trainrun.words import counted

PYTHON_SECONDS = 300.0
"""The first import of torch reads gigabytes from a volume that is still being fetched from S3."""
PRODUCT_SECONDS = 60.0
"""For the products on all accelerators together. They take milliseconds; starting CUDA on eight GPUs takes some seconds."""
HINT = "Set the job's python to the image's Python that has torch."


@dataclass(frozen=True, kw_only=True)
class Torch:
    """What the job's Python said."""

    torch: str
    cuda: str = ""
    """The CUDA that torch was built with; empty for a build without."""
    nccl: str = ""
    neuron: str = ""
    """The version of torch-neuronx."""
    devices: tuple[str, ...] = ()
    products: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By device: seconds, wrong (elements that differ from the CPU's), error."""
    error: str = ""
    """Why there are no devices although torch is built for some."""


def needs_torch(job: JobSpec) -> bool:
    """Whether the job's Python has to have torch: mpirun starts programs without any Python."""
    return job.launcher == "torchrun" or not job.is_program


def check_python(software: Software, cluster: ClusterSpec) -> str:
    """Import torch in the job's Python, compare versions, count devices, and multiply on each of them.

    Raises:
        StepFailed: what is wrong, all of it together.
    """
    found = ask_python(software)
    problems = [*torch_problems(cluster, cuda=found.cuda, nccl=found.nccl), *device_problems(found, cluster)]
    if problems:
        raise StepFailed("\n".join(f"{software.python} has torch {found.torch}. {problem}" for problem in problems))
    told = [f"torch {found.torch}"]
    told += [f"CUDA {found.cuda}"] if found.cuda else []
    told += [f"torch-neuronx {found.neuron}"] if found.neuron else []
    if found.products:
        slowest = max(result["seconds"] for result in found.products.values())
        told.append(f"right products on {counted(len(found.products), 'accelerator')} in {slowest:.1f} s")
    elif cluster.accelerator == "neuron":
        told.append("no product was tried: torch shows no Neuron devices of its own (torch-xla would compile for minutes)")
    return ", ".join(told)


def ask_python(software: Software, *, timeout: float = PYTHON_SECONDS, patience: float = PRODUCT_SECONDS) -> Torch:
    """Run `torch_program` with the job's Python.

    Raises:
        StepFailed: no such Python, or torch cannot be imported.
    """
    source = Path(torch_program.__file__).read_text(encoding="utf-8")
    environment = software.environment(os.environ)
    command = software.command([software.python, "-c", source, str(patience)], environment)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        text = f"it did not end within {timeout:g} s" if isinstance(error, subprocess.TimeoutExpired) else error
        raise StepFailed(f"{software.python} cannot be run to import torch: {text}. {HINT}") from None
    if done.returncode:
        lines = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise StepFailed(f"{software.python} cannot import torch (status {done.returncode}):\n{lines}\n{HINT}")
    said = json.loads(done.stdout.splitlines()[-1])
    return Torch(
        torch=said["torch"],
        cuda=said["cuda"],
        nccl=said.get("nccl", ""),
        neuron=said.get("torch-neuronx", ""),
        devices=tuple(said["devices"]),
        products=said["products"],
        error=said["error"],
    )


def device_problems(found: Torch, cluster: ClusterSpec) -> list[str]:
    """What is wrong with the devices that torch shows, or with what they compute."""
    problems = []
    if cluster.accelerator == "nvidia" and len(found.devices) != cluster.accelerators_per_node:
        why = f" ({found.error})" if found.error else ""
        built = "" if found.cuda else " It was built without CUDA: take a build with CUDA."
        problems.append(
            f"It can use {counted(len(found.devices), 'accelerator')}{why}, and {cluster.instance_type} has "
            f"{cluster.accelerators_per_node}.{built} Do nvidia-smi and CUDA_VISIBLE_DEVICES show all of them?"
        )
    for device in found.devices:
        result = found.products.get(device)
        if result is None:
            seen = f"did not end within {PRODUCT_SECONDS:g} s"
        elif result["error"]:
            seen = f"failed: {result['error']}"
        elif result["wrong"]:
            seen = f"differs from the CPU's in {result['wrong']} elements, where it has to be equal"
        else:
            continue
        problems.append(
            f"A product of two matrices of {torch_program.SIZE} x {torch_program.SIZE} on {device} {seen}. "
            "Replace the instance: this accelerator, or its driver, does not compute."
        )
    return problems
