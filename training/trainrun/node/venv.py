"""A venv with the job's requirements on top of the image's Python, whose packages, torch first of all, stay in sight.

uv makes it. uv does not look at packages outside the environment that it installs into, so it is told to leave out torch
and what is made for one version of it; that these fit is seen to before and after.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from trainrun.node import venv_probe
from trainrun.node.built_environment import Environment, build_environment, home_of_environments, said, tried
from trainrun.node.cached_folder import CachedFolder, key_of
from trainrun.node.commands import Run
from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.node.software import Software
from trainrun.spec import RunSpec, requirement_files
from trainrun.store import Store

PATH_FILE = "_traincluster_image.pth"
"""Adds the image's packages behind the environment's own. (--system-site-packages would add those of the Python that the
image's Python was made of, if that is itself in a venv, as in AWS's images.)"""
_NAMES_OF_UV = {"PIP_INDEX_URL": "UV_DEFAULT_INDEX", "PIP_EXTRA_INDEX_URL": "UV_INDEX", "PIP_FIND_LINKS": "UV_FIND_LINKS"}
_FINAL = re.compile(r"No solution found|not found in the package registry|Failed to build|Couldn't parse|hash mismatch", re.I)
_NO_INDEX = (
    "Is there a way to an index of packages? Isolated nodes have none: name one in the VPC (UV_DEFAULT_INDEX in the job's "
    "environment), put the packages into the image, or make this environment once with nodes that are not isolated: it is kept "
    "in the bucket."
)


def prepare_venv(spec: RunSpec, *, python: str, places: Places, store: Store, run: Run) -> tuple[Software, str]:
    """Have the environment. Returns it, and where it came from.

    Args:
        spec: the document.
        python: the image's Python.
        places: where things are on this node.
        store: where archives of environments are kept.
        run: runs tar.

    Raises:
        StepFailed: the requirements contradict the image, or cannot be installed.
    """
    job = spec.job
    try:
        texts = requirement_files(job.requirements, lambda name: _read(places.project / name))
    except ValueError as error:
        raise StepFailed(f"{error} Put it there, and deploy again.") from None
    facts = _facts(python, [places.project / name for name in texts])
    if facts["problems"]:
        raise StepFailed(
            f"{'; '.join(facts['problems'])}. torch comes from the image, where it fits the driver and EFA. Leave the line out "
            "or let it allow that version; for another torch use a container or an image of your own."
        )
    home = home_of_environments(spec.storage, places)
    folder = home / key_of("venv 1", home, json.dumps(texts), json.dumps(facts, sort_keys=True))
    environment = Environment(folder, variable="VIRTUAL_ENV")
    kept = CachedFolder(folder=folder, store=store, run=run)
    told = kept.obtain(
        lambda: _make(spec, folder=folder, python=python, facts=facts, places=places, environment=environment),
        verify=environment.verify,
    )
    return environment, f"{job.requirements}: {told}"


def _facts(python: str, files: list[Path]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        said([python, "-I", venv_probe.__file__, "facts", *map(str, files)], environment=dict(os.environ))
    )
    if "torch" not in found["family"]:
        raise StepFailed(f"{python} has no torch, on top of which requirements go. Set python to the image's that has it.")
    return found


def _make(spec: RunSpec, *, folder: Path, python: str, facts: dict[str, Any], places: Places, environment: Environment) -> str:
    variables = build_environment(spec.job)
    for name, of_uv in _NAMES_OF_UV.items():
        if name in variables:
            variables.setdefault(of_uv, variables[name])
    uv = find_uv(python, home=places.root / "opt/traincluster/uv", variables=variables)
    said([uv, "venv", "--quiet", "--no-project", "--python", python, str(folder)], environment=variables, quiet="uv venv")
    lines = [f"import site; site.addsitedir({path!r})" for path in facts["site"]]
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / PATH_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    overrides = folder / "of-the-image.txt"
    overrides.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in facts["family"]), encoding="utf-8")
    command = [uv, "pip", "install", "--quiet", "--no-cache", "--compile-bytecode", "--python", environment.python]
    command += ["-r", str(places.project / spec.job.requirements)]
    variables |= {"UV_OVERRIDE": str(overrides), "UV_LINK_MODE": "copy"}

    def install() -> None:
        said(command, environment=variables, folder=places.project, quiet=f"uv pip install -r {spec.job.requirements}")

    try:
        tried(install, final=lambda text: bool(_FINAL.search(text)))
    except StepFailed as failure:
        raise StepFailed(f"{failure}\n{_NO_INDEX}") from None
    probe = [environment.python, "-I", venv_probe.__file__, "conflicts", str(packages)]
    if conflicts := json.loads(said(probe, environment=dict(os.environ))):
        raise StepFailed(
            f"The requirements do not go with the image's torch: {'; '.join(conflicts)}. Choose versions of them that do, or "
            "use a container or an image of your own with another torch."
        )
    count = len([*packages.glob("*.dist-info")])
    return f"{count} packages besides the image's torch {facts['family']['torch']}"


def find_uv(python: str, *, home: Path, variables: dict[str, str]) -> str:
    """uv, from the image, or else from the index of packages into a folder of its own.

    Raises:
        StepFailed: it cannot be had.
    """
    beside = Path(python).with_name("uv")
    if found := shutil.which("uv", path=variables.get("PATH")) or (str(beside) if beside.exists() else None):
        return found
    own = home / "bin/uv"
    if own.exists():
        return str(own)
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(home), "uv"]
    try:
        tried(lambda: said(command, environment=variables, quiet="pip install uv"), final=lambda text: False)
    except StepFailed as failure:
        raise StepFailed(
            f"The image has no uv, which makes the environment, and it cannot be fetched. {failure}\n{_NO_INDEX}"
        ) from None
    return str(own)


def _read(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.is_file() else None
