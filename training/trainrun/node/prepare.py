"""Make the node ready for the job: folders, limits, upgrades off, clock, huge pages, disks, file systems, CloudWatch agent.

Each is a sub-step of its own, timed and told, and may run again: at each start of the agent, after a reboot too. Where a node
shares its machine's kernel (a local node, a container), what belongs to the machine is left alone.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from trainrun.node.clock_service import ensure_clock_service
from trainrun.node.cloudwatch_agent import configure
from trainrun.node.commands import run as run_command
from trainrun.node.disks import prepare_instance_store, prepare_volume
from trainrun.node.fstab import Mounted
from trainrun.node.host import has_own_kernel
from trainrun.node.huge_pages import reserve_huge_pages
from trainrun.node.interface import interface_of
from trainrun.node.mounts import prepare_mount
from trainrun.node.numa import read_topology
from trainrun.node.outcome import StepFailed
from trainrun.node.packages import packages_here
from trainrun.node.places import Places
from trainrun.node.substeps import Done, SubSteps
from trainrun.node.tools import Tools
from trainrun.node.upgrades import stop_upgrades
from trainrun.spec import ClusterSpec, RunSpec, StorageSpec

OPEN_FILES = 1_048_576
"""Open files allowed: data loaders and NCCL's sockets together pass the customary 1024."""


def prepare(*, spec: RunSpec, places: Places, node: str, address: str, attached: Callable[[], Mapping[str, str]]) -> str:
    """Do all that the job needs of the node; may run again. Returns what was done, sub-step by sub-step.

    Args:
        spec: the document.
        places: where things are on this node.
        node: the instance's id.
        address: the node's own address.
        attached: asks EC2 for the ids of this instance's volumes, by device name.

    Raises:
        StepFailed: EFA is wanted and memory cannot be locked without limit, or something cannot be mounted.
    """
    steps = SubSteps()
    own_kernel = has_own_kernel(places)
    tools = Tools(run=run_command, packages=packages_here() if own_kernel else None, notes=places.state)
    steps.run("folders", lambda: make_folders(places))
    steps.run("limits", lambda: raise_limits(spec.cluster))
    if places.root == Path("/"):  # a plain process leaves its machine alone
        # Before storage, which may install a client for the very kernel that runs.
        steps.run("upgrades", stop_upgrades)
    if own_kernel:
        steps.run("clock", lambda: ensure_clock_service(tools))
    steps.run("huge pages", lambda: reserve_huge_pages(efa=spec.cluster.efa_interfaces > 0, own_kernel=own_kernel))
    for name, action in storage_steps(spec.storage, places=places, address=address, attached=attached, tools=tools):
        steps.run(name, action)
    steps.run("NUMA", lambda: prepare_binding(spec, tools=tools))
    steps.run("CloudWatch agent", lambda: configure(spec, node=node, places=places, run=tools.run))
    return steps.summary()


def make_folders(places: Places) -> Done:
    """Make the folders that the agent and the ranks write to."""
    folders = (places.state, places.metrics, places.logs, places.rank_logs)
    missing = [folder for folder in folders if not folder.is_dir()]
    for folder in missing:
        folder.mkdir(parents=True, exist_ok=True)
    return Done(f"{len(folders)} of the agent's own", changed=bool(missing))


def raise_limits(cluster: ClusterSpec) -> Done:
    """Raise the limits of the agent, and so of all that it starts.

    Raises:
        StepFailed: EFA is wanted and memory cannot be locked without limit.
    """
    files = _raise_limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    memory = _raise_limit(resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY)
    if cluster.efa_interfaces and memory != resource.RLIM_INFINITY:
        raise StepFailed(
            f"At most {memory} bytes of memory can be locked. EFA needs no limit, else it fails with "
            '"Libfabric error (-12)". Run the agent as the systemd unit trainrun.service (LimitMEMLOCK=infinity).'
        )
    return Done(f"open files {files}, locked memory {'unlimited' if memory == resource.RLIM_INFINITY else memory}")


def storage_steps(
    storage: StorageSpec,
    *,
    places: Places,
    address: str,
    attached: Callable[[], Mapping[str, str]],
    tools: Tools,
    mounted: Mounted | None = None,
) -> list[tuple[str, Callable[[], Done]]]:
    """What mounts disks and shared file systems, by its name, in order."""
    mounted = mounted or Mounted()
    if places.root != Path("/"):
        return [(path, partial(_stand_in, path, places)) for path in _paths(storage)]
    steps: list[tuple[str, Callable[[], Done]]] = []
    if store := storage.instance_store:
        steps.append(("instance store", partial(prepare_instance_store, store, tools=tools, mounted=mounted)))
    volumes = attached() if storage.volumes else {}
    for volume in storage.volumes:
        action = partial(prepare_volume, volume, tools=tools, mounted=mounted, attached=volumes)
        steps.append((f"volume {volume.path}", action))
    interface = interface_of(address) if storage.mounts else ""
    for mount in storage.mounts:
        steps.append((f"mount {mount.path}", partial(prepare_mount, mount, tools=tools, mounted=mounted, interface=interface)))
    return steps


def prepare_binding(spec: RunSpec, *, tools: Tools) -> Done:
    """Have what binds ranks to the processors near their GPUs, if this node has several NUMA nodes. The launch binds them."""
    topology = read_topology()
    nodes = len(topology.processors)
    if nodes < 2 or not topology.gpus or spec.job.numa == "none":
        return Done(f"{nodes} NUMA nodes, {len(topology.gpus)} GPUs, nothing to bind")
    detail = f"{nodes} NUMA nodes, GPUs at {', '.join(map(str, topology.gpus))}"
    if spec.job.launcher == "mpirun":
        return Done(detail)
    try:
        installed = tools.want("numactl")
    except StepFailed as failure:
        return Done(f"{detail}, but ranks are not bound: {failure}")
    return Done(f"{detail}{installed}", changed=bool(installed))


def _paths(storage: StorageSpec) -> list[str]:
    paths = [*(volume.path for volume in storage.volumes), *(mount.path for mount in storage.mounts)]
    return [storage.instance_store, *paths] if storage.instance_store else paths


def _stand_in(path: str, places: Places) -> Done:
    """A folder where a mount would be: a node that is a plain process can mount nothing."""
    folder = places.root / path.lstrip("/")
    there = folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    return Done(f"{folder} is a plain folder that stands in for a mount", changed=not there)


def _raise_limit(limit: int, wanted: int) -> int:
    """Raise a limit, for this process and all it starts, as far as is allowed; the limit reached."""
    soft, hard = resource.getrlimit(limit)
    if soft == wanted:
        return soft
    try:  # root may raise the hard limit too
        resource.setrlimit(limit, (wanted, wanted))
    except (ValueError, OSError):
        reachable = hard if hard != resource.RLIM_INFINITY else wanted
        try:
            resource.setrlimit(limit, (reachable, hard))
        except (ValueError, OSError):  # macOS caps open files below its own "unlimited"
            return soft
    return resource.getrlimit(limit)[0]
