"""What a job runs with, as far as its document and its source say: containers, requirements, conda.

Standard library only: the CDK side checks with it at synth what a node would refuse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

CONTAINER_PYTHON = "python3"

_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*(?::\d+)?/)?"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?P<name>{_HOST}{_PART}(?:/{_PART})*)(?::(?P<tag>\w[\w.-]{{0,127}}))?(?:@(?P<digest>sha256:[0-9a-f]{{64}}))?"
)
"""A container image's reference (github.com/distribution/reference)."""
_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.(?P<domain>amazonaws\.com(?:\.cn)?)/(?P<repository>[^:@]+)"
)


@dataclass(frozen=True, kw_only=True)
class EcrImage:
    """Where an image of Amazon ECR is."""

    account: str
    region: str
    repository: str
    registry: str
    """The host to log in to."""


def ecr_image(container: str) -> EcrImage | None:
    """Where an image is in ECR; None for another registry's. ECR Public needs no login and is another's."""
    found = _ECR.match(container)
    if not found:
        return None
    account, region, repository = found["account"], found["region"], found["repository"]
    return EcrImage(account=account, region=region, repository=repository, registry=container.partition("/")[0])


def registry_of(container: str) -> str:
    """The registry's host."""
    first, slash, _ = container.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else "docker.io"


def is_pinned(container: str) -> bool:
    """Whether the reference means the same image for ever."""
    return "@sha256:" in container


def software_problems(
    *,
    container: str,
    container_python: str,
    requirements: str,
    conda: str,
    launcher: str,
) -> Iterator[str]:
    """What is wrong with these settings of a job by themselves."""
    given = [name for name, value in (("container", container), ("requirements", requirements), ("conda", conda)) if value]
    if len(given) > 1:
        yield f"{' and '.join(given)} are set, but a job runs with one of them. Leave the others out."
    for name, value in (("requirements", requirements), ("conda", conda)):
        path = PurePosixPath(value)
        if value and (path.is_absolute() or ".." in path.parts):
            yield f"{name} is {value!r}. Give a file of the job's source, by its path there."
    if not container:
        if container_python != CONTAINER_PYTHON:
            yield f"container_python is {container_python!r}, but there is no container. Leave it out."
        return
    if not _REFERENCE.fullmatch(container):
        yield (
            f"container is {container!r}, which names no image. Give its reference in lower case, such as "
            "'123456789012.dkr.ecr.us-east-1.amazonaws.com/train@sha256:...' or 'pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime'."
        )
    if not container_python:
        yield "container_python is empty. Give the container's Python that has torch, such as 'python3'."
    if launcher == "mpirun":
        yield (
            "container is set, but the launcher is mpirun: its daemons start the ranks on the node itself, and share memory and "
            "sockets with them, which a container cuts off. Use torchrun, or have the programs in the node's image."
        )


def requirement_files(name: str, read: Callable[[str], str | None]) -> dict[str, str]:
    """The texts of a requirements file and of all that it names by -r and -c, by their paths in the source.

    Args:
        name: the file.
        read: the text of a file of the source; None when it is not there.

    Raises:
        ValueError: a file is not there, or a line means something that only the machine at hand has.
    """
    texts: dict[str, str] = {}
    waiting = [name]
    for each in waiting:
        if each in texts:
            continue
        text = read(each)
        if text is None:
            by = "requirements" if each == name else name
            raise ValueError(f"{by} names {each!r}, which is not in the job's source (hidden files are left out).")
        texts[each] = text
        folder = PurePosixPath(each).parent
        for line in _lines(text):
            if found := re.match(r"(?:-r|--requirement|-c|--constraint)[\s=]*(\S+)", line):
                waiting.append(_joined(folder, found[1]))
            elif re.match(r"(-e\b|--editable\b|\.|/|file:|[^#]*@\s*file:)", line):
                raise ValueError(
                    f"{each!r} has the line {line!r}, which means files beside it. The job's source is on the "
                    "module path as it is: leave the line out. Put other packages into an index or a bucket and name them by URL."
                )
    return texts


def _lines(text: str) -> Iterator[str]:
    """The lines without comments, continued ones joined."""
    for line in text.replace("\\\n", " ").splitlines():
        if stripped := re.sub(r"(^|\s)#.*", "", line).strip():
            yield stripped


def _joined(folder: PurePosixPath, name: str) -> str:
    parts: list[str] = []
    for part in (folder / name).parts:
        if part == ".." and parts:
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)
