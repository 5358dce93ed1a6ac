"""The job in a container: its image pulled, its programs run in it, nothing of it left behind."""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from trainrun.node.built_environment import said
from trainrun.node.commands import Run
from trainrun.node.container_command import LABEL, ContainerNode, Kind, container_command, devices_here
from trainrun.node.container_pull import pull
from trainrun.node.docker_root import move_to_instance_store
from trainrun.node.host import has_own_kernel
from trainrun.node.launch import working_directory
from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.node.service import PASSED_ON
from trainrun.node.software import Software
from trainrun.node.substeps import Done, SubSteps
from trainrun.spec import RunSpec

ENGINES: tuple[Kind, ...] = ("docker", "podman")
log = logging.getLogger(__name__)
_NO_TOOLKIT = re.compile(r"could not select device driver|nvidia-container|unresolvable CDI|libnvidia-ml", re.IGNORECASE)
_NO_PROGRAM = re.compile(r"executable file .*not found|no such file or directory", re.IGNORECASE)


class Container(Software):
    """A container image, in which each program has a container of its own."""

    sees_node = False

    def __init__(self, node: ContainerNode, *, run_name: str, python: str, job_variables: Mapping[str, str], run: Run) -> None:
        """Args:
        node: what containers are given of this node.
        run_name: the run's, in the names of containers.
        python: the Python in the image that has torch.
        job_variables: the job's own environment.
        run: runs the engine.
        """
        super().__init__(python)
        self._node, self._run_name, self._job_variables, self._run = node, run_name, job_variables, run

    def command(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
        """As `Software.command`. The image's own variables stay: PATH and HOME of the agent, for one, do not get in."""
        variables = self._variables(os.environ if environment is None else environment)
        name = f"traincluster-{self._run_name}-{uuid.uuid4().hex[:8]}"
        return container_command(self._node, argv, name=name, variables=variables)

    def _variables(self, environment: Mapping[str, str]) -> list[str]:
        """Names of those that are meant for the program: trainrun's, the job's, and whatever the agent itself lacks."""
        return [
            name
            for name, value in environment.items()
            if name.startswith(PASSED_ON) or name in self._job_variables or os.environ.get(name) != value
        ]

    def processes(self) -> list[int]:
        """The first process of each container, as the node numbers it."""
        found = []
        with suppress(StepFailed):
            for one in self._containers():
                found.append(int(self._run(self._node.engine, "inspect", "--format={{.State.Pid}}", one).strip()))
        return [pid for pid in found if pid > 0]  # 0 of one that has ended, which would mean this process to kill()

    def clear(self) -> None:
        try:
            left = self._containers()
        except StepFailed as failure:
            log.warning("Whether containers are left over is not known: %s", failure)
            return
        for one in left:
            with suppress(StepFailed):  # it ends by itself at this moment, and is removed
                self._run(self._node.engine, "rm", "--force", one)

    def _containers(self) -> list[str]:
        return self._run(self._node.engine, "ps", "--all", "--quiet", f"--filter=label={LABEL}={self._node.node}").split()


def prepare_container(
    spec: RunSpec,
    *,
    places: Places,
    node: str,
    run: Run,
    devices: Callable[[], tuple[str, ...]] = devices_here,
) -> tuple[Software, str]:
    """Have the image, and make sure that programs run in it. Returns the software, and what was done.

    Args:
        spec: the document.
        places: where things are on this node.
        node: the instance's id.
        run: runs commands.
        devices: finds the devices besides NVIDIA's.

    Raises:
        StepFailed: no engine, no image, or no program can be run in it.
    """
    kind, engine = find_engine()
    _wait_for_engine(kind, engine, own_kernel=has_own_kernel(places), run=run)
    job = spec.job
    container = _without_tag(job.container)
    container_node = ContainerNode(
        kind=kind,
        engine=engine,
        image=container,
        node=node,
        accelerator=spec.cluster.accelerator,
        devices=devices(),
        folders=folders_of(spec, places),
        working_directory=str(working_directory(places)),
        user=f"{os.getuid()}:{os.getgid()}",
    )
    software = Container(container_node, run_name=spec.run, python=job.container_python, job_variables=job.environment, run=run)
    steps = SubSteps()

    def clear() -> Done:
        software.clear()
        return Done(f"none is left of an agent before this one, {kind}")

    def probe() -> Done:
        return Done(f"{job.container_python} {_probe(software, spec)}")

    steps.run("containers", clear)
    if kind == "docker" and spec.storage.instance_store and has_own_kernel(places):
        steps.run("data root", lambda: move_to_instance_store(spec.storage.instance_store, run=run))
    steps.run("pull", lambda: pull(container, engine=engine, folder=places.state / "registry", run=run))
    steps.run("first program", probe)
    return software, steps.summary()


def find_engine() -> tuple[Kind, str]:
    """The container engine.

    Raises:
        StepFailed: the image has none.
    """
    for kind in ENGINES:
        if program := shutil.which(kind):
            return kind, program
    raise StepFailed(
        "The job runs in a container, but the image has neither docker nor podman. AWS's deep-learning images have Docker. "
        "Install one in an image of your own, and for NVIDIA GPUs the NVIDIA Container Toolkit."
    )


def _without_tag(reference: str) -> str:
    """A reference by tag and digest as one by digest alone, which all engines understand alike."""
    return re.sub(r":[^:/@]+@", "@", reference)


def folders_of(spec: RunSpec, places: Places) -> tuple[str, ...]:
    """What a container sees at the same paths as the node."""
    storage = spec.storage
    paths = [storage.instance_store, *(one.path for one in storage.volumes), *(one.path for one in storage.mounts)]
    own = [places.payload, places.spec.parent, places.state, places.logs]
    return tuple(dict.fromkeys(map(str, [*own, *(places.root / path.lstrip("/") for path in paths if path)])))


def _wait_for_engine(kind: Kind, engine: str, *, own_kernel: bool, run: Run) -> None:
    """See to it that the engine answers.

    Raises:
        StepFailed: it does not, with what it said.
    """
    try:
        run(engine, "info")
    except StepFailed as failure:
        if kind != "docker" or not own_kernel:
            raise StepFailed(f"{failure} Does the container engine run?") from None
        run("systemctl", "start", "docker")
        run(engine, "info")


def _probe(software: Container, spec: RunSpec) -> str:
    """Run a first program, so that whatever is wrong is told by this step, in words."""
    argv = [software.python, "-c", "import sys; print(sys.version.split()[0])"]
    environment = software.environment(os.environ)
    try:
        return said(
            software.command(argv, environment), environment=environment, quiet=f"{software.python} in the container"
        ).strip()
    except StepFailed as failure:
        text = str(failure)
    hint = "See what it says above; every program of the job would fail likewise."
    if spec.cluster.accelerator == "nvidia" and _NO_TOOLKIT.search(text):
        hint = (
            "The image of the nodes lacks the NVIDIA Container Toolkit, which lets containers have GPUs, or its configuration "
            "(nvidia-ctk runtime configure --runtime=docker). AWS's deep-learning images have it."
        )
    elif _NO_PROGRAM.search(text):
        hint = "Set container_python to the Python of the container's image that has torch."
    raise StepFailed(f"{text}\n{hint}")
