"""A conda environment of the job's own, made by whichever of conda's programs the image has."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from trainrun.node.built_environment import Environment, build_environment, home_of_environments, said, tried
from trainrun.node.cached_folder import CachedFolder, key_of
from trainrun.node.commands import Run
from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.node.software import Software
from trainrun.spec import RunSpec
from trainrun.store import Store

PROGRAMS = ("micromamba", "mamba", "conda")
"""The fastest first."""
FOLDERS = ("/opt/conda/bin", "/opt/miniconda3/bin", "/opt/miniforge3/bin", "/opt/anaconda3/bin")
"""Where images have them that no login shell has put on the PATH."""

_FINAL = re.compile(r"ResolvePackageNotFound|could not solve|PackagesNotFound|parse", re.IGNORECASE)


def prepare_conda(
    spec: RunSpec, *, places: Places, store: Store, run: Run, folders: Sequence[str] = FOLDERS
) -> tuple[Software, str]:
    """Have the environment. Returns it, and where it came from.

    Args:
        spec: the document.
        places: where things are on this node.
        store: where archives of environments are kept.
        run: runs tar.
        folders: where conda's programs are besides the PATH.

    Raises:
        StepFailed: there is no such file or none of conda's programs, or the environment cannot be made.
    """
    file = places.project / spec.job.conda
    if not file.is_file():
        raise StepFailed(f"conda is {spec.job.conda!r}, which is not in the job's source. Put it there, and deploy again.")
    home = home_of_environments(spec.storage, places)
    machine = [sys.platform, platform.machine(), *platform.libc_ver()]
    folder = home / key_of("conda 1", home, machine, file.read_text(encoding="utf-8"))
    environment = Environment(folder, variable="CONDA_PREFIX")

    def make() -> str:
        program = find_conda(folders)
        variables = {**build_environment(spec.job), "CONDA_ALWAYS_YES": "true", "MAMBA_ALWAYS_YES": "true"}
        create = ["create"] if Path(program).name == "micromamba" else ["env", "create"]
        command = [program, *create, "--quiet", "--prefix", str(folder), "--file", str(file)]

        def create_it() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            said(command, environment=variables, folder=places.project)

        try:
            tried(create_it, final=lambda text: bool(_FINAL.search(text)))
        except StepFailed as failure:
            raise StepFailed(
                f"{failure}\nDo the environment's packages exist, and is there a way to its channels? Isolated nodes have none: "
                "use a channel in the VPC, an image of your own, or a container."
            ) from None
        return Path(program).name

    told = CachedFolder(folder=folder, store=store, run=run).obtain(make, verify=environment.verify)
    return environment, f"{spec.job.conda}: {told}"


def find_conda(folders: Sequence[str]) -> str:
    """One of conda's programs.

    Raises:
        StepFailed: the image has none.
    """
    path = os.pathsep.join([os.environ.get("PATH", ""), *folders])
    for name in PROGRAMS:
        if found := shutil.which(name, path=path):
            return found
    raise StepFailed(
        f"conda is set, but the image has none of {', '.join(PROGRAMS)} on the PATH or in {', '.join(folders)}. Use an image of "
        "your own that has one, or requirements, or a container."
    )
