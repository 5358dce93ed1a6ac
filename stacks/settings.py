"""The settings of the reference stacks: one YAML file, and `-c name=value` on top of it."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union

import yaml
from aws_cdk import aws_logs as logs

from stacks.storage_settings import EfsSettings, LustreSettings, VolumeSettings
from traincluster import Capacity, EfaLayout, NodeImage, SshAccess, TrainingJob
from traincluster.instances import instance_type
from traincluster.notifications import check_email
from traincluster.readiness import DEFAULT_MINUTES, Readiness
from traincluster.retention import retention_of
from traincluster.rules.image import OperatingSystem
from trainrun.spec import (
    CONTAINER_PYTHON,
    ConfigError,
    Launcher,
    MonitoringSpec,
    Numa,
    ReadinessWay,
    ShutdownSpec,
    StopSignal,
    TimeoutSpec,
    from_mapping,
    machine_metrics,
    merge,
    parse_scalar,
    train_settings,
    with_documents,
)

WhenDone = Literal["scale_to_zero", "keep"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that `cluster.yaml` can say. What is left out has the default given here."""

    run: str
    """Name of the run: the folder of its checkpoints. The same name resumes, another starts anew."""
    instance_type: str
    """EC2 instance type of the nodes."""
    nodes: int
    """Number of nodes."""
    min_nodes: int | None = None
    """Fewest nodes on which training goes on when others are lost; null means all of them."""
    start_nodes: bool = True
    """false deploys all but the nodes; scale the Auto Scaling group to start them."""
    processes_per_node: int | None = None
    """Ranks per node; null means one per GPU or Neuron core, or one on a CPU node."""
    capacity: str = "on-demand"
    """"on-demand", "spot" (also "spot:TYPE,TYPE" and "... with rebalancing"), "reservation:cr-..." (also "... in GROUP") or
    "block:cr-..." (also "... until 2026-12-24T11:30Z")."""
    efa: bool | None = None
    """Whether nodes have EFA; null means if their type does."""
    efa_layout: Literal["efa-only", "efa"] = "efa-only"
    """How EFA interfaces are laid out: AWS's current way, or the older one, in which each takes an address too."""
    efa_device_index: Literal[0, 1] = 0
    """Device index of the EFA interfaces on the network cards after the first."""
    placement_group: bool | str | None = None
    """true, false or the name of a group that exists; null means where it helps."""
    ami: str | None = None
    """Id of an image or name of an SSM parameter with one; null means AWS's newest deep-learning image for the type."""
    os: OperatingSystem | None = None
    """Operating system of the nodes; null means ubuntu-24.04. Without an ami it chooses among AWS's images."""
    python: str | None = None
    """The Python of that image that has torch; null means /opt/pytorch/bin/python. For an ami of your own only."""
    root_device: str | None = None
    """The root device of that image; null means the operating system's. For an ami of your own only."""
    root_volume_gib: int | None = None
    """Size of a node's root volume in GiB; null means 120, or 512 on Neuron types."""
    volumes: tuple[VolumeSettings, ...] = ()
    """EBS volumes of each node besides the root volume."""
    lustre: LustreSettings | None = None
    """A Lustre file system for the nodes; null means none."""
    efs: EfsSettings | None = None
    """An EFS file system for the nodes; null means none."""
    instance_store: str | None = None
    """Where the type's own disks are mounted, all as one; null leaves them alone."""
    region: str | None = None
    """Region of both stacks; null means the one that the credentials name at deploy."""
    availability_zone: str | None = None
    """Zone of the nodes, by name ("us-east-1b") or id ("use1-az4"); null means one of the region that by the library's record
    offers the type, or, without a region, the first that the account is shown."""
    isolated: bool = False
    """true cuts the nodes off the internet: AWS is reached through VPC endpoints only."""
    cidr: str | None = None
    """Address range of the VPC, /16 to /26; null means 10.0.0.0/16. Half of it is the nodes'."""
    flow_log_days: int | None = None
    """How long records of the network's traffic are kept; null means that none are made."""
    log_days: int = 30
    """How long the nodes' logs are kept."""
    ssh_from: tuple[str, ...] = ()
    """Address ranges that SSH is let in from; Session Manager needs none."""
    ssh_key_pair: str | None = None
    """Name of the EC2 key pair for SSH."""
    permissions_boundary: str | None = None
    """Name of the IAM policy that bounds the role of the nodes; null means no boundary."""
    source: str | None = None
    """Folder with your own training code, relative to the settings file; null trains the bundled GPT."""
    entry_point: str = "trainrun.pretrain"
    """What every rank runs: a script in the source ("train.py"), a module ("trainrun.pretrain"), a program in the source
    ("./run.sh"), or one of the image by its absolute path."""
    launcher: Launcher = "torchrun"
    """What starts the ranks: torchrun, or mpirun, which is the image's Open MPI (docs/launching.md)."""
    arguments: tuple[str, ...] = ()
    """Command-line arguments of the entry point."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of every rank."""
    data: str | None = None
    """Token dataset: a folder of the dataset bucket, or an s3:// URL."""
    training: dict[str, Any] = field(default_factory=dict)
    """How to train: the fields of `trainrun.settings.TrainSettings`."""
    numa: Numa = "auto"
    """Which processors a rank may use on a node with several NUMA nodes: those of its GPU's NUMA node ("node") or socket, an
    exclusive share of them, a core complex, all ("none"); "auto" is "node" where it can be done."""
    publish_seconds: float = 30.0
    """How often nodes send metrics to the checkpoint bucket."""
    metrics_namespace: str = machine_metrics.NAMESPACE
    """CloudWatch namespace of the machines' metrics, which the image's CloudWatch agent sends; "" leaves that agent alone."""
    notify: str | None = None
    """E-mail address that is told when the run ends, however it does; null means nobody."""
    readiness: Literal["none", "signal", "wait-condition"] = "none"
    """Whether a deploy waits until min_nodes nodes have passed their checks, and how it hears of it (docs/nodes.md). A lack of
    capacity then rolls the stack back."""
    readiness_minutes: int | None = None
    """For how long; null means 30. At most 60 for "signal", 720 for "wait-condition"."""
    on_success: WhenDone = "scale_to_zero"
    """What becomes of the nodes when the run has succeeded."""
    on_failure: WhenDone = "keep"
    """What becomes of them when it has failed."""
    keep_minutes: int | None = 120
    """For how long "keep" keeps them; null means until somebody ends them."""
    max_restarts: int = 20
    """Restarts of the job on one node before the run counts as failed."""
    same_failures: int = 2
    """Failures in a row, by the same error at the same step, after which the run counts as failed."""
    max_replacements: int = 5
    """Nodes of the run, in 24 hours, that are replaced because they did not pass their checks; the next such ends the run."""
    container: str = ""
    """Container image that the ranks run in, by its reference; empty means on the node itself (docs/nodes.md)."""
    container_python: str = CONTAINER_PYTHON
    """The Python in that image that has torch."""
    requirements: str = ""
    """File of the source with Python packages, which are installed besides those of the nodes' image (docs/nodes.md)."""
    conda: str = ""
    """File of the source with a conda environment, which takes the place of the image's Python (docs/nodes.md)."""
    stop_signal: StopSignal = ""
    """Signal that each rank of a node gets besides the file "stop" when it is to save and leave (docs/nodes.md); empty means
    none."""
    termination_hook: bool | None = None
    """Whether a node that the Auto Scaling group ends may save first; null means unless capacity is spot."""
    bandwidth_check: bool = False
    """Whether a node measures the all-reduce over its GPUs before it trains, and is replaced if that is too slow."""
    timeouts: TimeoutSpec = field(default_factory=TimeoutSpec)
    """How long to wait for what, in seconds."""

    def __post_init__(self) -> None:
        problems = [*dict.fromkeys(self._problems())]
        if problems:
            raise ConfigError(problems)

    @property
    def parsed_capacity(self) -> Capacity:
        return Capacity.parse(self.capacity)

    @property
    def image(self) -> NodeImage | None:
        """The image of the user's own, or AWS's for the operating system, if either is set."""
        if self.ami is None:
            return None if self.os is None else NodeImage.for_type(self.instance_type, os=self.os)
        image = NodeImage(ami=self.ami, os=self.os or "ubuntu-24.04", root_device=self.root_device)
        return image if self.python is None else replace(image, python=self.python)

    @property
    def ssh(self) -> SshAccess | None:
        """SSH to the nodes, if it is asked for."""
        if self.ssh_key_pair is None and not self.ssh_from:
            return None
        return SshAccess(sources=self.ssh_from, key_pair=self.ssh_key_pair or "")

    @property
    def log_retention(self) -> logs.RetentionDays:
        return retention_of(self.log_days, setting="log_days")

    @property
    def flow_log_retention(self) -> logs.RetentionDays | None:
        return None if self.flow_log_days is None else retention_of(self.flow_log_days, setting="flow_log_days")

    @property
    def parsed_efa_layout(self) -> EfaLayout:
        return EfaLayout(kind=self.efa_layout, device_index=self.efa_device_index)

    @property
    def parsed_readiness(self) -> Readiness:
        """How a deploy waits for its nodes."""
        if self.readiness == "none":
            if self.readiness_minutes is not None:
                raise ConfigError(["readiness_minutes is set, but readiness is 'none', which waits for nothing. Leave it out."])
            return Readiness.none()
        if not self.start_nodes:
            raise ConfigError([f"readiness is {self.readiness!r}, but start_nodes is false: there is no node to wait for."])
        way: ReadinessWay = "signal" if self.readiness == "signal" else "wait_condition"
        return Readiness(way=way, minutes=DEFAULT_MINUTES if self.readiness_minutes is None else self.readiness_minutes)

    @property
    def shutdown(self) -> ShutdownSpec:
        return ShutdownSpec(
            on_success=self.on_success,
            on_failure=self.on_failure,
            keep_minutes=self.keep_minutes,
            max_restarts=self.max_restarts,
            same_failures=self.same_failures,
            max_replacements=self.max_replacements,
        )

    def _problems(self) -> Iterator[str]:
        for check in (
            lambda: instance_type(self.instance_type),
            lambda: TrainingJob(run=self.run),
            lambda: self.parsed_capacity,
            lambda: self.image,
            lambda: self.ssh,
            lambda: self.shutdown,
            lambda: self.parsed_readiness,
            lambda: check_email(self.notify) if self.notify is not None else None,
            lambda: MonitoringSpec(namespace=self.metrics_namespace),
            lambda: self.log_retention,
            lambda: self.flow_log_retention,
        ):
            try:
                check()
            except ValueError as error:
                yield str(error)
        if self.region is not None and not _REGION.fullmatch(self.region):
            yield f"region is {self.region!r}. Give the name of an AWS region, such as 'us-east-1'."
        for name in ("python", "root_device"):
            if self.ami is None and getattr(self, name) is not None:
                yield f"{name} is {getattr(self, name)!r}, but describes the image in ami, which is not set. Set both or neither."
        if isinstance(self.placement_group, str) and self.placement_group.lower() in _NO_GROUP_NAMES:
            yield f"placement_group is {self.placement_group!r}. Write true or false, or the name of a group that exists."
        if self.root_device is not None and not self.root_device.startswith("/dev/"):
            yield f"root_device is {self.root_device!r}. Give the device of the image's root volume, such as '/dev/sda1'."
        if self.python is not None and not self.python.startswith("/"):
            yield f"python is {self.python!r}. Give the whole path of it in the image, such as '/opt/pytorch/bin/python'."
        try:
            train_settings(self.training, source="training")
        except ConfigError as error:
            yield from (f"training: {problem}" for problem in error.problems)
        if "data" in self.training:
            yield "training.data is set. Set data instead, which also lets the nodes read it."
        if self.data is None and self.entry_point == "trainrun.pretrain":
            yield "data is not set, but trainrun.pretrain trains on a token dataset. Set data to a folder of the dataset bucket."
        elif self.data is not None and not _DATA.fullmatch(self.data):
            yield f"data is {self.data!r}. Give a folder of the dataset bucket, such as 'corpus', or a URL, such as 's3://bucket/corpus'."


_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")
_NO_GROUP_NAMES = ("", "true", "false", "yes", "no", "on", "off", "null", "none")
_FOLDER = r"(?!\.\.?(?:/|$))[\w.=-]+(?:/(?!\.\.?(?:/|$))[\w.=-]+)*/?"
_BUCKET = r"(?![a-z0-9.-]*(?:\.\.|\.-|-\.))[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_DATA = re.compile(rf"s3://{_BUCKET}(?:/|/{_FOLDER})?|{_FOLDER}")


def read_settings(context: Mapping[str, Any], *, default_file: Path) -> Settings:
    """Read the settings file and lay `-c name=value` over it.

    Args:
        context: the CDK app's context. `settings` names the file, relative to the working directory; every other key that is
            a plain (or dotted) name is a setting. The CDK's own keys have a ":", "@" or "/" and are left alone.
        default_file: the file to read when the context names none.

    Raises:
        ConfigError: unknown or ill-typed settings, all together, or a file that cannot be read.
    """
    own = {key: value for key, value in context.items() if not re.search("[:@/]", key)}
    file = Path(str(own.pop("settings", default_file)))
    given = merge(_read_file(file), _overrides(own))
    if references := sorted(_reference_paths(given)):
        problem = f"{', '.join(references)}: '${{Token[' is how the CDK writes references. A setting cannot hold it."
        raise ConfigError([problem])
    if isinstance(given.get("training"), dict):
        given["training"] = with_documents(given["training"], folder=file.parent)
    settings = from_mapping(Settings, given, source=f"{file} or -c")
    if settings.source is None:
        return settings
    return replace(settings, source=str(file.parent / settings.source))


def _reference_paths(value: Any, path: str = "") -> Iterator[str]:
    """The dotted names of the settings whose text the CDK would take for a reference."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _reference_paths(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _reference_paths(item, path)
    elif isinstance(value, str) and "${Token[" in value:
        yield path


def _read_file(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"The settings file {str(file)!r} cannot be read: {error}. Name one by -c settings=FILE."]) from None
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError([f"The settings file {str(file)!r} is not YAML: {' '.join(str(error).split())}."]) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError([f"The settings file {str(file)!r} must be a mapping of settings, not {content!r}."])
    return content


class _Loader(yaml.SafeLoader):
    """YAML's safe types, and no key twice: the first of the two would be ignored."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the setting {key!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _overrides(own: Mapping[str, Any]) -> dict[str, Any]:
    """The context's settings as a nested mapping; `-c` gives text only, which is read as the setting's type asks."""
    mapping: dict[str, Any] = {}
    for key, value in own.items():
        path = key.split(".")
        nested = _parse(value, _hint(Settings, path)) if isinstance(value, str) else value
        for name in reversed(path):
            nested = {name: nested}
        mapping = merge(mapping, nested)
    return mapping


def _hint(hint: Any, path: list[str]) -> Any:
    """The type of the setting at a dotted path, Any where there is none."""
    for name in path:
        if is_dataclass(hint) and name in {f.name for f in fields(hint)}:
            hint = typing.get_type_hints(hint)[name]
        elif typing.get_origin(hint) is dict:
            hint = typing.get_args(hint)[1]
        else:
            return Any
    return hint


def _parse(text: str, hint: Any) -> Any:
    """Text of the command line as a value: as it stands where only text is allowed, so that a run may be called 2026."""
    choices = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    value = parse_scalar(text)
    if str in choices and type(value) not in choices:
        return text
    return value
