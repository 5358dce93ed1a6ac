"""The command that runs a program in the job's container: what it is given of the node, option by option.

Nothing secret is in it, since every user of the node can read command lines: variables are named, and the engine takes their
values from its own environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainrun.spec import Accelerator

Kind = Literal["docker", "podman"]

DEVICES = ("neuron[0-9]*", "infiniband/uverbs[0-9]*", "gdrdrv")
"""Below /dev: Neuron's devices, EFA's, and what NCCL's plugin for EFA copies by. NVIDIA's are the toolkit's matter."""
OPEN_FILES = 1_048_576
STACK_BYTES = 67_108_864
LABEL = "traincluster"


@dataclass(frozen=True, kw_only=True)
class ContainerNode:
    """What a container is given of its node."""

    kind: Kind
    engine: str
    """The engine's program."""
    image: str
    node: str
    """The instance's id: containers are labelled with it, so that those left over are found."""
    accelerator: Accelerator
    devices: tuple[str, ...]
    """Paths of the devices besides NVIDIA's."""
    folders: tuple[str, ...]
    """Paths that the container sees as the node does: the payload, the state, the logs, disks and file systems."""
    working_directory: str
    user: str
    """Numbers of the user and the group who write those folders: "0:0"."""


def container_command(node: ContainerNode, argv: Sequence[str], *, name: str, variables: Iterable[str]) -> list[str]:
    """The command line.

    Args:
        node: what the container is given.
        argv: the program and its arguments, which run instead of what the image would.
        name: the container's.
        variables: names of what is to be in its environment; the values are in that of the engine's program.
    """
    program, *arguments = argv
    return [
        *(node.engine, "run", "--rm", f"--name={name}", f"--label={LABEL}={node.node}"),
        "--pull=never",  # it is there, and a launch waits for no registry
        "--init",  # reaps orphans, and passes signals on to a program that as process 1 would not get them
        "--network=host",  # ranks listen at the node's own address; EFA is no matter of network namespaces
        "--ipc=host",  # NCCL and data loaders need more shared memory than the 64 MiB of a container's own
        "--ulimit=memlock=-1:-1",
        f"--ulimit=stack={STACK_BYTES}:{STACK_BYTES}",
        f"--ulimit=nofile={OPEN_FILES}:{OPEN_FILES}",
        "--cap-add=IPC_LOCK",  # EFA registers memory
        *_accelerators(node),
        *(f"--device={path}" for path in node.devices),
        *(f"--volume={path}:{path}" for path in node.folders),
        *(["--security-opt=label=disable"] if node.kind == "podman" else []),  # SELinux would keep it from those folders
        f"--workdir={node.working_directory}",
        f"--user={node.user}",
        *(f"--env={name}" for name in sorted(variables)),
        f"--entrypoint={program}",
        node.image,
        *arguments,
    ]


def devices_here(folder: Path = Path("/dev")) -> tuple[str, ...]:
    """Paths of the devices that a container is given on this node."""
    return tuple(str(path) for pattern in DEVICES for path in sorted(folder.glob(pattern)))


def _accelerators(node: ContainerNode) -> list[str]:
    if node.accelerator != "nvidia":
        return []
    return ["--gpus=all"] if node.kind == "docker" else ["--device=nvidia.com/gpu=all"]
