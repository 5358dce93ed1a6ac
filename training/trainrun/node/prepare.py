"""Make the node ready for the job: folders, limits, automatic upgrades off, disks and shared file systems.

Huge pages, clocks and monitoring agents come with the features that use them.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from pathlib import Path

from trainrun.node.commands import Run
from trainrun.node.commands import run as run_command
from trainrun.node.disks import prepare_instance_store, prepare_volume
from trainrun.node.fstab import Mounted
from trainrun.node.interface import interface_of
from trainrun.node.mounts import prepare_mount
from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.node.upgrades import stop_upgrades
from trainrun.spec import RunSpec, StorageSpec

OPEN_FILES = 1_048_576
"""Open files allowed: data loaders and NCCL's sockets together pass the customary 1024."""


def prepare(*, spec: RunSpec, places: Places, address: str, attached: Callable[[], Mapping[str, str]]) -> str:
    """Make folders, raise limits, mount what is to be mounted; may run again. Returns what was done.

    Args:
        spec: the document.
        places: where things are on this node.
        address: the node's own address.
        attached: asks EC2 for the ids of this instance's volumes, by device name.

    Raises:
        StepFailed: EFA is wanted and memory cannot be locked without limit, or something cannot be mounted.
    """
    for folder in (places.state, places.metrics, places.logs, places.rank_logs):
        folder.mkdir(parents=True, exist_ok=True)
    files = _raise_limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    memory = _raise_limit(resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY)
    if spec.cluster.efa_interfaces and memory != resource.RLIM_INFINITY:
        raise StepFailed(
            f"At most {memory} bytes of memory can be locked; EFA needs no limit, else it fails with "
            '"Libfabric error (-12)". Run the agent as the systemd unit trainrun.service (LimitMEMLOCK=infinity).'
        )
    limits = f"open files: {files}, locked memory: {'unlimited' if memory == resource.RLIM_INFINITY else memory}"
    # Before storage, which may install a client for the very kernel that runs. A plain process leaves its machine alone.
    upgrades = [stop_upgrades()] if places.root == Path("/") else []
    return ", ".join([limits, *upgrades, *prepare_storage(spec.storage, places=places, address=address, attached=attached)])


def prepare_storage(
    storage: StorageSpec,
    *,
    places: Places,
    address: str,
    attached: Callable[[], Mapping[str, str]],
    run: Run = run_command,
    mounted: Mounted | None = None,
) -> list[str]:
    """Mount disks and shared file systems, and say of each what was done.

    Raises:
        StepFailed: something cannot be mounted.
    """
    mounted = mounted or Mounted()
    if places.root != Path("/"):
        return [_stand_in(path, places) for path in _paths(storage)]
    done = []
    if storage.instance_store:
        done.append(prepare_instance_store(storage.instance_store, run=run, mounted=mounted))
    volumes = attached() if storage.volumes else {}
    done += [prepare_volume(volume, run=run, mounted=mounted, attached=volumes) for volume in storage.volumes]
    interface = interface_of(address) if storage.mounts else ""
    done += [prepare_mount(mount, run=run, mounted=mounted, interface=interface) for mount in storage.mounts]
    return done


def _paths(storage: StorageSpec) -> list[str]:
    paths = [*(volume.path for volume in storage.volumes), *(mount.path for mount in storage.mounts)]
    return [storage.instance_store, *paths] if storage.instance_store else paths


def _stand_in(path: str, places: Places) -> str:
    """A folder where a mount would be: a node that is a plain process can mount nothing."""
    folder = places.root / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    return f"{folder} is a plain folder that stands in for a mount"


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
