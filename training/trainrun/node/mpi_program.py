"""Where Open MPI is on this node.

Open MPI 4 has a daemon called orted, Open MPI 5 one of PRRTE called prted; what else differs between the two is a matter
of variables' names (`mpi_command`).
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainrun.node.outcome import StepFailed
from trainrun.spec import JobSpec

EFA_FOLDER = Path("/opt/amazon/openmpi/bin")
"""Where AWS's EFA installer, and so its deep-learning images, put Open MPI 4."""
VERSION_SECONDS = 60.0
MOST_SAID = 200
"""Characters of what a program says that is not Open MPI's."""
DAEMONS = ("prted", "orted")


@dataclass(frozen=True, kw_only=True)
class Mpirun:
    """An Open MPI."""

    program: Path
    """mpirun, by its absolute path: from that Open MPI knows where its libraries are."""
    version: str

    @property
    def daemon(self) -> Path:
        """What mpirun has started on every other node."""
        return next(path for name in DAEMONS if (path := self.program.with_name(name)).exists())


def find_mpirun(job: JobSpec, *, python: str, environment: Mapping[str, str]) -> Mpirun:
    """The first Open MPI on: the PATH that the job sets, the folder of the job's Python, EFA's folder, the agent's own PATH.

    Raises:
        StepFailed: there is none; with all that was looked at.
    """
    seen = []
    for folder in dict.fromkeys(_folders(job, python=python, environment=environment)):
        program = folder / "mpirun"
        if not program.exists():
            seen.append(str(folder))
            continue
        version, problem = _version(program)
        if not problem and not any(program.with_name(name).exists() for name in DAEMONS):
            problem = f"it has neither {' nor '.join(DAEMONS)} beside it"
        if not problem:
            return Mpirun(program=program, version=version)
        seen.append(f"{folder} (its mpirun will not do: {problem})")
    raise StepFailed(
        f"The job's launcher is mpirun, but there is no Open MPI 4 or 5 here. Looked for mpirun in: {', '.join(seen)}. "
        f"AWS's deep-learning images have it in {EFA_FOLDER}, and AWS's EFA installer puts it there on other images. "
        'For one elsewhere name its folder in the job\'s environment: {"PATH": "/folder/bin:/usr/bin:/bin"}.'
    )


def _folders(job: JobSpec, *, python: str, environment: Mapping[str, str]) -> Iterator[Path]:
    for text in (job.environment.get("PATH", ""), str(Path(python).parent), str(EFA_FOLDER), environment.get("PATH", "")):
        yield from (Path(folder).absolute() for folder in text.split(os.pathsep) if folder)


def with_home(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with a HOME, which Open MPI does not start without and a systemd unit does not have."""
    return {"HOME": str(Path.home()), **environment}


def _version(program: Path) -> tuple[str, str]:
    """The version of Open MPI's mpirun, or what is wrong with it."""
    try:
        done = subprocess.run(
            [program, "--version"],
            env=with_home(os.environ),
            capture_output=True,
            text=True,
            timeout=VERSION_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if found := re.search(r"\((?:Open MPI|OpenRTE|PRRTE)\) (\S+)", done.stdout):
        return found.group(1), ""
    said = " ".join((done.stderr or done.stdout).split())[:MOST_SAID]
    return "", f"asked for its version it says {said!r}"
