"""What starts the ranks."""

from __future__ import annotations

import os

from trainrun.node.mpi_program import find_mpirun
from trainrun.spec import JobSpec


def check_launcher(job: JobSpec, *, python: str) -> str:
    """Find mpirun, where that is the launcher; torchrun is a part of torch.

    Raises:
        StepFailed: there is none.
    """
    if job.launcher == "torchrun":
        return "torchrun"
    mpirun = find_mpirun(job, python=python, environment=os.environ)
    return f"Open MPI {mpirun.version} ({mpirun.program})"
