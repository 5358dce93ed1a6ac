"""RunSpec: the one document that the CDK side writes into the user-data and a node reads.

Standard library only. Everything a node needs to know is here or is asked of AWS by name; nothing on a node
asks the laptop. Values that CloudFormation fills in (bucket names, keys) may be unresolved CDK tokens while
the document is built, so text fields are not checked beyond their type.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainrun import machine_metrics
from trainrun.config import ConfigError, from_mapping, merge, parse_scalar, to_mapping
from trainrun.deepspeed_json import BatchSizes, batch_sizes
from trainrun.memory import host_bytes_of_bundled
from trainrun.settings import TrainSettings
from trainrun.settings.layers import train_settings, with_documents
from trainrun.spec_cluster import Accelerator, ClusterSpec, group_drains, hook_heartbeat
from trainrun.spec_ending import ReadinessSpec, ReadinessWay, ShutdownSpec
from trainrun.spec_software import (
    CONTAINER_PYTHON,
    EcrImage,
    ecr_image,
    is_pinned,
    registry_of,
    requirement_files,
    software_problems,
)

SCHEMA_VERSION = 1

OWNED_VARIABLES = (
    "TRAINRUN_SPEC",
    "TRAINRUN_STATE",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("OMPI_MCA_plm", "OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm_rsh_no_tree_spawn", "OMPI_MCA_orte_tmpdir_base"),
    *("PRTE_MCA_plm", "PRTE_MCA_plm_ssh_agent", "PRTE_MCA_plm_ssh_no_tree_spawn", "PRTE_MCA_prte_tmpdir_base"),
)
"""Environment variables of the ranks that the node agent, or what it launches, sets and a job may not."""

Launcher = Literal["torchrun", "mpirun"]

StopSignal = Literal["", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"]

Numa = Literal["auto", "none", "node", "socket", "exclusive", "core-complex"]


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What to run."""

    entry_point: str
    """What every rank runs: a script of the payload's project ("train.py"), a module ("trainrun.pretrain"), a program of
    the project ("./run.sh"), or a program of the image by its absolute path ("/usr/local/bin/all_reduce_perf")."""
    launcher: Launcher = "torchrun"
    """What starts the ranks: torchrun, or Open MPI's mpirun."""
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    configuration: dict[str, Any] = field(default_factory=dict)
    """What `trainrun.start` lays over its defaults: the fields of `trainrun.settings.TrainSettings`, as a mapping."""
    python: str = "/opt/pytorch/bin/python"
    """The image's Python that has torch (DLAMI: /opt/pytorch/bin/python)."""
    container: str = ""
    """Reference of the container image that the ranks run in; empty means on the node itself."""
    container_python: str = CONTAINER_PYTHON
    """The Python in that image that has torch."""
    requirements: str = ""
    """File of the project with Python packages that are installed besides the image's."""
    conda: str = ""
    """File of the project with the conda environment that the ranks run in, instead of the image's Python."""
    stop_signal: StopSignal = ""
    """What each rank of a node gets, once, besides the file "stop" when the node asks it to save and leave; empty means
    nothing. `trainrun.start` needs none; a loop of one's own may rather handle a signal than look for a file."""
    numa: Numa = "auto"
    """Which processors a rank may use, where a node has several NUMA nodes and GPUs: those of its GPU's NUMA node ("node") or
    socket, an exclusive share of the NUMA node's, or one core complex (torchrun's --numa-binding); all ("none"). "auto" is
    "node" where it can be done. A node that cannot do what is asked by name fails; mpirun takes "auto", "none" and "node"."""

    def __post_init__(self) -> None:
        if taken := sorted(set(OWNED_VARIABLES) & set(self.environment)):
            raise ConfigError([f"environment sets {', '.join(taken)}, which the node agent sets itself. Remove it."])
        given = {f"arguments[{i}]": text for i, text in enumerate(self.arguments)}
        given |= {f"environment.{name}": text for name, text in self.environment.items()}
        if unfit := [name for name, text in given.items() if "\0" in text or not _encodes(text)]:
            raise ConfigError([f"{', '.join(unfit)} holds a NUL or half a surrogate pair, which no program can be given."])
        if self.launcher == "mpirun" and self.numa not in ("auto", "none", "node"):
            raise ConfigError([f"numa is {self.numa!r}, but the launcher mpirun takes 'auto', 'none' or 'node'."])
        if problems := [
            *software_problems(
                container=self.container,
                container_python=self.container_python,
                requirements=self.requirements,
                conda=self.conda,
                launcher=self.launcher,
            )
        ]:
            raise ConfigError(problems)

    @property
    def is_script(self) -> bool:
        """Whether Python runs the entry point as a file."""
        return self.entry_point.endswith(".py")

    @property
    def is_program(self) -> bool:
        """Whether the entry point is run by itself, without Python."""
        return is_program(self.entry_point)


@dataclass(frozen=True, kw_only=True)
class MountSpec:
    """One shared file system, which every node mounts at the same path."""

    type: Literal["lustre", "nfs4", "efs"]
    """What `mount -t` is told: FSx for Lustre; EFS through the kernel's NFS client; EFS through amazon-efs-utils (TLS)."""
    source: str
    """What is mounted: "fs-... .amazonaws.com@tcp:/name" (Lustre), "fs-... .amazonaws.com:/" (NFS), "fs-...:/" (EFS)."""
    path: str
    """Absolute path of the mount point."""
    options: str = ""
    """Mount options besides those that the type always has, separated by commas."""
    efa: bool = False
    """Whether Lustre's traffic takes the EFA interfaces, for which the node's client has to be configured."""


@dataclass(frozen=True, kw_only=True)
class VolumeSpec:
    """One EBS volume besides the root volume, of which every node has its own."""

    device: str
    """The name in the launch template, such as "/dev/sdf". A Nitro instance's kernel knows the disk by another."""
    path: str
    """Absolute path of the mount point."""


@dataclass(frozen=True, kw_only=True)
class StorageSpec:
    """Where results go, and what a node mounts."""

    location: str
    """URL under which the run keeps everything: "s3://bucket/prefix". The run's own folder is location/run."""
    mounts: tuple[MountSpec, ...] = ()
    """Shared file systems."""
    volumes: tuple[VolumeSpec, ...] = ()
    """EBS volumes of the node's own."""
    instance_store: str = ""
    """Where the node's instance store is mounted, all of its disks as one; empty leaves it alone."""


@dataclass(frozen=True, kw_only=True)
class TimeoutSpec:
    """How long to wait, in seconds."""

    meet: int = 900
    """For the group to have nodes_min nodes in service, before the run's nodes have ever met: then it has failed. Afterwards they
    wait for as long as it takes, and tell each time so many seconds have passed what is missing."""
    rendezvous: int = 600
    """For the nodes of a launch to find each other."""
    peer_lost: int = 10
    """Silence after which a peer counts as lost."""
    stop_grace: int = 90
    """Between a request to stop and SIGKILL of the ranks, which is what they have for the last checkpoint (their
    checkpoint.stop_seconds, unless the configuration says less). A spot notice gives 120."""
    no_progress: int = 1800
    """Without a step of a rank, after which it counts as hung: what each rank does is written down, and the job is started
    anew. Four times as long before a launch's first step, and between steps. Longer than any step; 0 never looks."""

    def __post_init__(self) -> None:
        problems = [
            f"{f.name} is {getattr(self, f.name)}. Allowed: 1 or more, in seconds."
            for f in dataclasses.fields(self)
            if f.name != "no_progress" and getattr(self, f.name) < 1
        ]
        if self.no_progress < 0:
            problems.append(f"no_progress is {self.no_progress}. Allowed: 1 or more, in seconds, or 0, which never looks.")
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True, kw_only=True)
class MonitoringSpec:
    """How the node tells what it does."""

    publish_seconds: float = 30.0
    """How often metric lines are sent to the run's folder."""
    log_group: str = ""
    """CloudWatch log group of the cluster; empty means none."""
    namespace: str = machine_metrics.NAMESPACE
    """CloudWatch namespace of the machine's metrics, which the image's CloudWatch agent sends; empty leaves that agent alone."""
    topic: str = ""
    """ARN of the SNS topic that hears when the run ends, however it does; empty means none."""

    def __post_init__(self) -> None:
        if problem := machine_metrics.namespace_problem(self.namespace):
            raise ConfigError([problem])
        if not 0 < self.publish_seconds < math.inf:
            raise ConfigError([f"publish_seconds is {self.publish_seconds}. Allowed: more than 0."])


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The whole document."""

    run: str
    """Name of the run: the folder of its checkpoints. The same name resumes, another starts anew."""
    region: str
    cluster: ClusterSpec
    job: JobSpec
    storage: StorageSpec
    timeouts: TimeoutSpec = field(default_factory=TimeoutSpec)
    monitoring: MonitoringSpec = field(default_factory=MonitoringSpec)
    shutdown: ShutdownSpec = field(default_factory=ShutdownSpec)
    readiness: ReadinessSpec = field(default_factory=ReadinessSpec)
    payload_sha256: str = ""
    """Digest of the packed code that runs with this document; a change of code is a change of document."""
    schema: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.schema != SCHEMA_VERSION:
            problem = (
                f"schema is {self.schema}, this trainrun reads {SCHEMA_VERSION}. Deploy again with the trainrun of the payload."
            )
            raise ConfigError([problem])
        checkpoint = self.job.configuration.get("checkpoint")
        stop_seconds = checkpoint.get("stop_seconds") if isinstance(checkpoint, Mapping) else None
        if isinstance(stop_seconds, (int, float)) and stop_seconds > self.timeouts.stop_grace:
            problem = (
                f"checkpoint.stop_seconds is {stop_seconds} and timeouts.stop_grace {self.timeouts.stop_grace}: the ranks would "
                "be killed before their time is over. Raise stop_grace, and leave out stop_seconds, which then is the same."
            )
            raise ConfigError([problem])

    @property
    def run_location(self) -> str:
        """URL of the run's own folder."""
        return f"{self.storage.location.rstrip('/')}/{self.run}"

    def to_json(self) -> str:
        """The document: compact, keys sorted, so that equal specs give equal bytes. Defaults are left out."""
        return json.dumps(_without_defaults(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """Read a document.

        Raises:
            ConfigError: not JSON, unknown keys, wrong types, another schema version.
        """
        try:
            mapping = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError([f"The run specification is not JSON: {error}."]) from None
        return from_mapping(cls, mapping, source="the run specification")


def is_program(entry_point: str) -> bool:
    """Whether an entry point is a program, which is run by itself: "./run.sh" of the project, or an absolute path."""
    return entry_point.startswith(("/", "./")) and not entry_point.endswith(".py")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _without_defaults(value: Any) -> dict[str, Any]:
    """The mapping of a dataclass less the fields at their defaults: user data has 16 KiB in all."""
    mapping = {}
    for f in dataclasses.fields(value):
        item = getattr(value, f.name)
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if item == default and f.name != "schema":
            continue
        mapping[f.name] = _plain(item)
    return mapping


def _plain(item: Any) -> Any:
    if isinstance(item, tuple):
        return [_plain(each) for each in item]
    return _without_defaults(item) if dataclasses.is_dataclass(item) else item


# Also the settings and their grammar: the CDK side imports nothing of trainrun but this module.
__all__ = [
    "CONTAINER_PYTHON",
    "SCHEMA_VERSION",
    "Accelerator",
    "BatchSizes",
    "ClusterSpec",
    "ConfigError",
    "EcrImage",
    "JobSpec",
    "Launcher",
    "MonitoringSpec",
    "MountSpec",
    "Numa",
    "ReadinessSpec",
    "ReadinessWay",
    "RunSpec",
    "ShutdownSpec",
    "StopSignal",
    "StorageSpec",
    "TimeoutSpec",
    "TrainSettings",
    "VolumeSpec",
    "batch_sizes",
    "ecr_image",
    "from_mapping",
    "group_drains",
    "hook_heartbeat",
    "host_bytes_of_bundled",
    "is_pinned",
    "is_program",
    "machine_metrics",
    "merge",
    "parse_scalar",
    "registry_of",
    "requirement_files",
    "software_problems",
    "to_mapping",
    "train_settings",
    "with_documents",
]
