"""What can go wrong with what starts the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from traincluster.rules.engine import rule
from traincluster.rules.finding import Finding
from trainrun.spec import Launcher, Numa


@dataclass(frozen=True, kw_only=True)
class LauncherFacts:
    """How a job is launched, and by which image's means."""

    launcher: Launcher
    sets_path: bool
    """Whether the job's environment has a PATH, which may name an Open MPI of the image."""
    ami: str | None
    """The image; None when it is not known."""
    is_deep_learning: bool
    """Whether that is one of AWS's deep-learning images."""


@rule(
    "mpirun-is-in-image",
    summary="An image of one's own has an Open MPI where the job is launched by mpirun.",
    source="docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html: AWS's EFA installer puts Open MPI in /opt/amazon/openmpi",
    levels=("warning",),
)
def mpirun_is_in_image(facts: LauncherFacts) -> Iterator[Finding]:
    if facts.launcher == "mpirun" and not facts.is_deep_learning and not facts.sets_path:
        yield Finding(
            "warning",
            "mpirun-is-in-image",
            f"The job is launched by mpirun, which AWS's deep-learning images have; whether {facts.ami or 'the image'} has it is "
            "not known here. A node without it fails in its check.",
            "Have AWS's EFA installer in the image, or name the folder of another Open MPI in the PATH of the job's environment.",
        )


@dataclass(frozen=True, kw_only=True)
class BindingFacts:
    """How ranks are to be bound to processors, on what kind of node."""

    numa: Numa
    instance_type: str
    gpus: int
    """NVIDIA GPUs of a node."""
    processes_per_node: int


@rule(
    "numa-needs-a-gpu-per-rank",
    summary="Ranks that are to be bound to the processors near their GPU have one GPU each.",
    source="torch/numa/binding.py: the rank with local rank i is bound near GPU i",
    levels=("error",),
)
def numa_needs_a_gpu_per_rank(facts: BindingFacts) -> Iterator[Finding]:
    if facts.numa in ("auto", "none") or facts.gpus == facts.processes_per_node:
        return
    have = f"{facts.processes_per_node} ranks for {facts.gpus} NVIDIA GPUs" if facts.gpus else "no NVIDIA GPUs"
    yield Finding(
        "error",
        "numa-needs-a-gpu-per-rank",
        f"numa is {facts.numa!r}, which binds each rank near its GPU, but nodes of type {facts.instance_type} have {have}.",
        "Leave numa out, which binds ranks where it can be done.",
    )
