"""Run by the image's Python: what it has that packages besides it must fit, and whether they do.

``python -I venv_probe.py facts REQUIREMENTS...`` prints what an environment on this Python depends on, and what of the
requirements contradicts it. ``python -I venv_probe.py conflicts FOLDER`` prints what is installed in that folder and does not
go with the image's torch, or takes something from it. Standard library, and `packaging` from wherever it is.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def torch_family() -> dict[str, str]:
    """torch and whatever is installed for exactly one version of it, such as torchvision; name -> version."""
    family: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        name = canonical(one.metadata["Name"] or "")
        if name == "torch" or any(re.match(r"torch\s*\(?==", need) for need in one.requires or ()):
            family.setdefault(name, one.version)
    return family


def facts(requirements: list[Path]) -> dict[str, Any]:
    """What an environment depends on, and what is wrong with the requirements."""
    family = torch_family()
    problems = [problem for file in requirements for problem in contradictions(file.read_text("utf-8"), family)]
    return {
        "python": [sys.version, sys.executable, sys.prefix, sys.base_prefix],
        "platform": [sys.platform, platform.machine(), *platform.libc_ver()],
        "site": sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}),
        "family": family,
        "problems": problems,
    }


def contradictions(text: str, family: dict[str, str]) -> Iterator[str]:
    """Requirements that another version of the image's torch family would have to meet."""
    requirement = packaging("requirements").Requirement
    for line in text.replace("\\\n", " ").splitlines():
        stripped = re.sub(r"(^|\s)#.*|\s--hash.*", "", line).strip()
        try:
            wanted = requirement(stripped)
        except ValueError:  # an option, or nothing
            continue
        version = family.get(canonical(wanted.name))
        if version is None or (wanted.marker and not wanted.marker.evaluate()):
            continue
        if wanted.url or not wanted.specifier.contains(version, prereleases=True):
            yield f"{stripped} is required, but the image has {wanted.name} {version}"


def conflicts(folder: str) -> list[str]:
    """What in a folder does not go with the image's torch family, or keeps that family from what it needs."""
    requirement = packaging("requirements").Requirement
    family = torch_family()
    added = {canonical(one.metadata["Name"] or "") for one in importlib.metadata.distributions(path=[folder])}
    versions = {canonical(one.metadata["Name"] or ""): one for one in reversed([*importlib.metadata.distributions()])}
    found = []
    for name in sorted(added | set(family)):
        for need in (versions[name].requires or ()) if name in versions else ():
            wanted = requirement(need)
            other = canonical(wanted.name)
            concerns = other in family if name in added else other in added
            if not concerns or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
                continue
            if not wanted.specifier.contains(versions[other].version, prereleases=True):
                found.append(f"{name} {versions[name].version} needs {need}, but there is {other} {versions[other].version}")
    return found


def canonical(name: str) -> str:
    """A distribution's name as names are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def packaging(module: str) -> Any:
    """A module of `packaging`, from wherever this Python has it."""
    for package in ("packaging", "pip._vendor.packaging", "setuptools._vendor.packaging"):
        try:
            return importlib.import_module(f"{package}.{module}")
        except ImportError:
            continue
    sys.exit("This Python has neither packaging, nor pip, nor setuptools, by one of which versions are compared.")


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    print(json.dumps(facts([Path(one) for one in rest]) if what == "facts" else conflicts(*rest)))
