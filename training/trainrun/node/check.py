"""Check that the node has what the job was promised, before its peers wait for it.

The agent does it at each of its starts, and ``python -m trainrun check`` by hand. What belongs to one subject is in one module
of `trainrun.node.checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from trainrun.node.checks.accelerators import check_accelerators
from trainrun.node.checks.bandwidth import check_bandwidth
from trainrun.node.checks.clock import check_clock
from trainrun.node.checks.disks import (
    STATE_FREE_BYTES,
    check_disk,
    check_reading,
    read_only_folders,
    writable_folders,
)
from trainrun.node.checks.efa import check_efa, check_locked_memory
from trainrun.node.checks.fabric import check_fabric
from trainrun.node.checks.launcher import check_launcher
from trainrun.node.checks.memory_errors import check_memory_errors
from trainrun.node.checks.python import check_python, needs_torch
from trainrun.node.checks.runner import Check, Checked, ChecksFailed, run_checks
from trainrun.node.checks.store import check_store
from trainrun.node.checks.versions import check_driver, check_efa_installer
from trainrun.node.checks.xid import check_xids
from trainrun.node.outcome import Unfit
from trainrun.node.places import Places
from trainrun.node.software import Software
from trainrun.spec import ClusterSpec, RunSpec
from trainrun.store import Store


def check(
    *,
    spec: RunSpec,
    software: Software,
    places: Places,
    node: str,
    store: Store,
    key: str,
    send: Callable[[], None],
) -> list[Checked]:
    """Check everything, so that all faults are reported together.

    Args:
        spec: the document.
        software: what the job runs with.
        places: where things are on this node.
        node: names what is written for a moment.
        store: the run's folder.
        key: an object in it that is this node's alone.
        send: writes that object.

    Raises:
        ChecksFailed: a StepFailed; what was seen, what was expected, what to do; one or more sentences a fault.
    """
    results = run_checks([Check("fabric manager", partial(check_fabric, spec.cluster))])  # without it CUDA does not start
    results += run_checks(
        [
            *machine_checks(spec.cluster),
            Check("torch", lambda: check_python(software, spec.cluster) if needs_torch(spec.job) else "no torch needed"),
            Check("launcher", partial(check_launcher, spec.job, python=software.python)),
            *disk_checks(spec, places=places, node=node),
            Check("clock", lambda: check_clock(s3_endpoint(spec))),
            Check("store", partial(check_store, store, key=key, send=send)),
        ]
    )
    if spec.cluster.bandwidth_check and not any(one.fault for one in results):
        results += run_checks([Check("bandwidth", partial(check_bandwidth, software, spec.cluster))])
    if any(one.fault for one in results):
        raise ChecksFailed(results)
    return results


def check_machine_again(cluster: ClusterSpec) -> None:
    """Look once more at the machine itself after a launch failed: a GPU may have fallen off, and no new try brings it back.

    Raises:
        Unfit: what was found.
    """
    if cluster.accelerator == "none":
        return
    results = run_checks(list(machine_checks(cluster)))
    if faults := [one for one in results if one.fault]:
        raise Unfit("After the launch failed: " + str(ChecksFailed(faults)))


def machine_checks(cluster: ClusterSpec) -> Iterator[Check]:
    """What is looked at of the machine itself."""
    if cluster.accelerator != "none":
        yield Check("driver", partial(check_driver, cluster))
    yield Check("accelerators", partial(check_accelerators, cluster))
    if cluster.accelerator == "nvidia":
        yield Check("Xid messages", partial(check_xids, cluster))
        yield Check("GPU memory", partial(check_memory_errors, cluster))
    if cluster.efa_interfaces:
        yield Check("EFA", partial(check_efa, cluster))
        yield Check("EFA software", partial(check_efa_installer, cluster))
        yield Check("locked memory", partial(check_locked_memory, cluster))


def disk_checks(spec: RunSpec, *, places: Places, node: str) -> Iterator[Check]:
    """Each folder that the job may write to, and the agent's own."""
    yield Check("state folder", partial(check_disk, places.state, node=node, least_free=STATE_FREE_BYTES))
    for folder in writable_folders(spec.storage, places):
        yield Check(f"disk {folder}", partial(check_disk, folder, node=node))
    for folder in read_only_folders(spec.storage, places):
        yield Check(f"disk {folder}", partial(check_reading, folder))


def told(results: list[Checked]) -> str:
    """All in one line, for the event: "torch 3.10 s: torch 2.13.0; launcher 0.00 s: torchrun; ..."."""
    return "; ".join(map(str, results))


def s3_endpoint(spec: RunSpec) -> str:
    """Where the run's requests to S3 go, or "" for a run on a file system."""
    if not spec.storage.location.startswith("s3://"):
        return ""
    import boto3  # only here: a machine without S3 needs none

    endpoint: str = boto3.session.Session().client("s3", region_name=spec.region).meta.endpoint_url
    return endpoint
