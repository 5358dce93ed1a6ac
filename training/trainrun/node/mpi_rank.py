"""One rank under mpirun: ``python -m trainrun.node.mpi_rank``, which Open MPI starts and which starts the job's own program.

It gives the program what torchrun would give it (RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE from Open MPI's own
variables), puts its output where torchrun would put it, and notes how it ended, because Open MPI's exit code does not
tell: Open MPI 5.0.11 ends with 0 when it has lost a node. Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

VARIABLE = "TRAINRUN_RANK"
ASKED_TO_STOP = 75
"""As in `trainrun.node.outcome`."""
CANNOT_RUN = 127
"""Exit code of shells for a command that is not there."""


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """What the agent tells the ranks of its node, in one variable of their environment."""

    command: list[str]
    working_directory: str
    folder: str
    """Where each rank's folder is, named by its number on the node: stdout.log, stderr.log, pid, exit_code."""
    processors: list[list[int]] = field(default_factory=list)
    """Those that each rank of the node may use; none means all."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Open MPI's account of a rank in torchrun's names."""
    return {
        "RANK": environment["OMPI_COMM_WORLD_RANK"],
        "WORLD_SIZE": environment["OMPI_COMM_WORLD_SIZE"],
        "LOCAL_RANK": environment["OMPI_COMM_WORLD_LOCAL_RANK"],
        "LOCAL_WORLD_SIZE": environment["OMPI_COMM_WORLD_LOCAL_SIZE"],
    }


def main() -> int:
    """Run the rank to its end. Returns what Open MPI is to see: 0 also for a rank that saved and left because it was asked.

    At any other code Open MPI ends all ranks at once, and those that are still saving would not get to the end of it.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # a group for each rank: what a signal to it, the agent's or Open MPI's, reaches
    signal.signal(signal.SIGTERM, lambda *_: None)  # it is meant for the program, which is in this group too
    environment = dict(os.environ)
    order = RankOrder(**json.loads(environment.pop(VARIABLE)))
    environment |= variables(environment)
    if order.processors:
        os.sched_setaffinity(0, order.processors[int(environment["LOCAL_RANK"])])
    folder = Path(order.folder) / environment["LOCAL_RANK"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "stdout.log").open("ab") as output, (folder / "stderr.log").open("ab") as errors:
        try:
            program = subprocess.Popen(
                order.command,
                env=environment,
                cwd=order.working_directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )
        except OSError as error:
            errors.write(f"{order.command[0]} cannot be run: {error}\n".encode())
            code = CANNOT_RUN
        else:
            _write(folder / "pid", os.getpid())  # last: who reads it may signal the program
            code = program.wait()
    _write(folder / "exit_code", code)
    return 0 if code == ASKED_TO_STOP else code if code >= 0 else 128 - code


def _write(path: Path, number: int) -> None:
    new = path.with_suffix(".new")
    new.write_text(str(number))
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
