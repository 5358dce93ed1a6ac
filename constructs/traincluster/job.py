"""TrainingJob: what a cluster runs."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, get_args

from traincluster.payload import packed_files
from trainrun.spec import (
    CONTAINER_PYTHON,
    ConfigError,
    JobSpec,
    Launcher,
    Numa,
    ShutdownSpec,
    StopSignal,
    TimeoutSpec,
    TrainSettings,
    is_program,
    requirement_files,
    software_problems,
    train_settings,
    with_documents,
)

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What a cluster runs: the bundled GPT, or a project of the user's.

    Everything is checked when the job is made, that is at synth, and all that is wrong is reported together.

    Example:
        >>> TrainingJob(run="smoke", configuration={"steps": 100}).entry_point
        'trainrun.pretrain'

    Raises:
        ConfigError: (a ValueError) with one sentence for each thing that is wrong.
    """

    run: str
    """Name of the run: the folder of its checkpoints. The same name resumes, another starts anew."""
    source: Path | str | None = None
    """Folder with the user's code; None runs a module of trainrun."""
    entry_point: str = "trainrun.pretrain"
    """What every rank runs: a script in the source ("train.py"), a module ("trainrun.pretrain", or one in the source), a
    program in the source ("./run.sh"), or one of the image by its absolute path ("/usr/local/bin/all_reduce_perf")."""
    launcher: Launcher = "torchrun"
    """What starts the ranks: "torchrun", or "mpirun", which is the image's Open MPI (Horovod, nccl-tests, Megatron-LM)."""
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `trainrun.settings.TrainSettings` that differ from their defaults. A DeepSpeed file is read here, at synth."""
    container: str = ""
    """Container image that the ranks run in, by its reference; empty means on the node itself (docs/nodes.md)."""
    container_python: str = CONTAINER_PYTHON
    """The Python in that image that has torch."""
    requirements: str = ""
    """File of the source with Python packages, which are installed besides those of the nodes' image."""
    conda: str = ""
    """File of the source with a conda environment, which takes the place of the image's Python."""
    stop_signal: StopSignal = ""
    """What each rank of a node gets besides the file "stop" when it is to save and leave; empty means nothing
    (docs/nodes.md)."""
    timeouts: TimeoutSpec = field(default_factory=TimeoutSpec)
    shutdown: ShutdownSpec = field(default_factory=ShutdownSpec)
    numa: Numa = "auto"
    """Which processors a rank may use on a node with several NUMA nodes: those of its GPU's NUMA node ("node") or socket, an
    exclusive share of them, a core complex, all ("none"); "auto" is "node" where it can be done."""
    publish_seconds: float = 30.0
    """How often a node sends its metrics to the checkpoint bucket."""

    def __post_init__(self) -> None:
        problems = [*self._kind_problems()] or [
            *self._identity_problems(),
            *self._entry_point_problems(),
            *self._software_problems(),
            *self._configuration_problems(),
        ]
        if problems:
            raise ConfigError(problems)

    @property
    def source_folder(self) -> Path | None:
        return None if self.source is None else Path(self.source)

    @property
    def settings(self) -> TrainSettings:
        """The job's configuration over trainrun's defaults."""
        return train_settings(self.inlined, source="the job's configuration")

    @property
    def inlined(self) -> dict[str, Any]:
        """The configuration as nodes get it: with what a DeepSpeed file on this machine holds, instead of its path."""
        return with_documents(self.configuration, folder=Path())

    def spec(self, *, python: str) -> JobSpec:
        """The part of the RunSpec that says what to run, with the image's Python."""
        return JobSpec(
            entry_point=self.entry_point,
            launcher=self.launcher,
            arguments=tuple(self.arguments),
            environment=dict(self.environment),
            configuration=self.inlined,
            python=python,
            container=self.container,
            container_python=self.container_python,
            requirements=self.requirements,
            conda=self.conda,
            numa=self.numa,
            stop_signal=self.stop_signal,
        )

    def _kind_problems(self) -> Iterator[str]:
        if not isinstance(self.run, str):
            yield f"run is {self.run!r}. Allowed: text, which names the folder of the run's checkpoints."
        if self.launcher not in get_args(Launcher):
            yield f"launcher is {self.launcher!r}. Allowed: {', '.join(map(repr, get_args(Launcher)))}."
        elif self.launcher == "mpirun" and self.numa in ("socket", "exclusive", "core-complex"):
            yield f"numa is {self.numa!r}, but the launcher mpirun takes 'auto', 'none' or 'node'."
        if self.stop_signal not in get_args(StopSignal):
            yield f"stop_signal is {self.stop_signal!r}. Allowed: {', '.join(map(repr, get_args(StopSignal)))}."
        elif self.stop_signal not in ("", "SIGTERM") and self.entry_point.partition(".")[0] == "trainrun":
            yield (
                f"stop_signal is {self.stop_signal!r}, which would end {self.entry_point} without a checkpoint: it looks for the "
                "file, and needs no signal. Leave stop_signal out."
            )
        for name in ("container", "container_python", "requirements", "conda"):
            if not isinstance(value := getattr(self, name), str):
                yield f"{name} is {value!r}. Allowed: text."
        if self.numa not in get_args(Numa):
            yield f"numa is {self.numa!r}. Allowed: {', '.join(map(repr, get_args(Numa)))}."
        if isinstance(self.arguments, str) or not all(isinstance(argument, str) for argument in self.arguments):
            yield f"arguments is {self.arguments!r}. Allowed: a list of texts, such as ['--config', 'llama.yaml']."
        for name, value in self.environment.items():
            if not isinstance(value, str):
                yield f"environment gives {name} the value {value!r}. Allowed: text. Put it in quotes."

    def _identity_problems(self) -> Iterator[str]:
        if not _RUN_NAME.fullmatch(self.run):
            yield (
                f"run is {self.run!r}. Allowed: letters, digits, '.', '_' and '-', at most 63, beginning with a letter or digit, "
                "since it names a folder in the checkpoint bucket."
            )
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                yield f"environment names the variable {name!r}. Allowed: letters, digits and '_', not beginning with a digit."
        if self.publish_seconds <= 0:
            yield f"publish_seconds is {self.publish_seconds}. Allowed: more than 0."

    def _entry_point_problems(self) -> Iterator[str]:
        folder, entry = self.source_folder, self.entry_point
        is_bundled = entry.partition(".")[0] == "trainrun"
        if entry.startswith("/"):  # the image's; what it holds is not known here
            if folder is not None and not folder.is_dir():
                yield f"source is {str(folder)!r}, which is not a folder. Give the folder that the program works in."
        elif folder is None:
            if is_bundled and not entry_point_in(packed_files(), entry):
                yield f"entry_point is {entry!r}, which is no module of trainrun. Use 'trainrun.pretrain'."
            elif not is_bundled:
                yield (
                    f"entry_point is {entry!r}, but there is no source that holds it. Set source, or use 'trainrun.pretrain', or "
                    "the absolute path of a program of the image."
                )
        elif not folder.is_dir():
            yield f"source is {str(folder)!r}, which is not a folder. Give the folder that holds the entry point."
        elif entry == type(self).entry_point:
            yield f"source is {str(folder)!r}, but no entry_point is set. Name the script in it that every rank runs: 'train.py'."
        elif is_bundled:
            yield f"source is {str(folder)!r}, but entry_point is {entry!r}, which uses nothing of it. Set one of the two only."
        elif not entry_point_in(packed_files(folder), entry):
            yield (
                f"entry_point is {entry!r}, which is not packed from the source {str(folder)!r}. Give a script ('train.py'), a "
                "module ('my_package.train') or a program ('./run.sh') there; hidden files and caches are left out."
            )
        elif is_program(entry) and not os.access(folder / entry, os.X_OK):
            yield f"entry_point is {entry!r}, which is not executable. Make it so: chmod +x {folder / entry}."

    def _software_problems(self) -> Iterator[str]:
        yield from software_problems(
            container=self.container,
            container_python=self.container_python,
            requirements=self.requirements,
            conda=self.conda,
            launcher=self.launcher,
        )
        folder = self.source_folder
        if not self.requirements and not self.conda:
            return
        if folder is None or not folder.is_dir():
            yield f"{'requirements' if self.requirements else 'conda'} names a file of the source, but there is none. Set source."
            return
        packed = packed_files(folder)
        if self.conda and self.conda not in packed:
            yield f"conda is {self.conda!r}, which is not in the job's source (hidden files are left out)."
        if self.requirements:
            try:
                requirement_files(self.requirements, lambda name: (folder / name).read_text("utf-8") if name in packed else None)
            except ValueError as error:
                yield str(error)

    def _configuration_problems(self) -> Iterator[str]:
        try:
            _ = self.settings
        except ConfigError as error:
            yield from error.problems
        if "run" in self.configuration:
            yield "The job's configuration sets run, which a node takes from the job. Set the job's run instead."
        checkpoint = self.configuration.get("checkpoint")
        if isinstance(checkpoint, Mapping) and "location" in checkpoint:
            yield "The job's configuration sets checkpoint.location, which a node takes from the cluster. Leave it out."


def entry_point_in(files: Collection[str], entry: str) -> bool:
    """Whether what a rank is to run is among the packed files, given by their names below the folder of the entry point."""
    if entry.endswith(".py") or is_program(entry):
        return PurePosixPath(entry).as_posix() in files
    if not _MODULE.fullmatch(entry):
        return False
    name = entry.replace(".", "/")
    return f"{name}.py" in files or f"{name}/__main__.py" in files
