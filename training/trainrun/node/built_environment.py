"""Environments that are made on a node: a venv with the job's requirements, or a conda environment."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from trainrun.node.mpi_program import with_home
from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.node.software import Software
from trainrun.spec import JobSpec, StorageSpec

BUILD_SECONDS = 1800.0
PAUSES = (2.0, 8.0, 20.0)
"""Before each further attempt at what needs a network."""
SAID_LINES = 12

Result = TypeVar("Result")


class Environment(Software):
    """A folder with a Python of its own."""

    def __init__(self, folder: Path, *, variable: str) -> None:
        """Args:
        folder: the environment's.
        variable: names the folder to programs, as an activation would.
        """
        super().__init__(str(folder / "bin/python"))
        self._folder, self._variable = folder, variable

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        path = os.pathsep.join([str(self._folder / "bin"), *filter(None, [base.get("PATH")])])
        return {**base, self._variable: str(self._folder), "PATH": path}

    def verify(self) -> None:
        """Run the environment's Python.

        Raises:
            StepFailed: it does not run, or takes itself for another's.
        """
        found = said([self.python, "-c", "import sys; print(sys.prefix)"], environment=dict(os.environ)).strip()
        if found != str(self._folder):
            raise StepFailed(f"{self.python} is at home in {found}, not in {self._folder}. Its environment is harmed.")


def home_of_environments(storage: StorageSpec, places: Places) -> Path:
    """Where environments go: on the instance store, which is fast, where there is one."""
    if storage.instance_store:
        return places.root / storage.instance_store.lstrip("/") / "traincluster/software"
    return places.root / "opt/traincluster/software"


def build_environment(job: JobSpec) -> dict[str, str]:
    """The environment of what fetches packages: the agent's and the job's, which may name an index of packages."""
    return with_home({**os.environ, **job.environment})


def said(command: Sequence[str], *, environment: Mapping[str, str], folder: Path | None = None, quiet: str = "") -> str:
    """What a program prints.

    Args:
        command: the program and its arguments.
        environment: its variables.
        folder: where it runs.
        quiet: what to call the command in messages; "" is its first words.

    Raises:
        StepFailed: it cannot be run or fails; with what it said, less passwords in URLs.
    """
    name = quiet or " ".join(map(str, command[:3]))
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StepFailed(f"{name} cannot be run: {error}.") from None
    if done.returncode:
        lines = without_secrets(done.stderr or done.stdout).strip().splitlines()[-SAID_LINES:]
        raise StepFailed(f"{name} failed with status {done.returncode}:\n" + ("\n".join(lines) or "it said nothing"))
    return done.stdout


def without_secrets(text: str) -> str:
    """A text whose URLs have no user and password."""
    return re.sub(r"//[^/@\s]+@", "//", text)


def tried(action: Callable[[], Result], *, final: Callable[[str], bool], pauses: Sequence[float] = PAUSES) -> Result:
    """What an action returns, after as many attempts as it takes.

    Args:
        action: raises StepFailed when it fails.
        final: whether a failure, by its text, is one that another attempt would repeat.
        pauses: seconds before each further attempt.

    Raises:
        StepFailed: that of the last attempt.
    """
    for pause in (*pauses, None):
        try:
            return action()
        except StepFailed as failure:
            if pause is None or final(str(failure)):
                raise
        time.sleep(pause)
    raise AssertionError("unreachable")
