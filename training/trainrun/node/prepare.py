"""Make the node ready for the job.

Folders and limits, which is all that a node without local disks and file systems needs. Instance store, FSx,
EFS, huge pages, clocks and monitoring agents come with the features that use them.
"""

from __future__ import annotations

import resource

from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.spec import RunSpec

OPEN_FILES = 1_048_576
"""Open files allowed: data loaders and NCCL's sockets together pass the customary 1024."""


def prepare(*, spec: RunSpec, places: Places) -> str:
    """Make folders and raise limits; may run again. Returns what was done.

    Raises:
        StepFailed: EFA is wanted and memory cannot be locked without limit.
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
    return f"open files: {files}, locked memory: {'unlimited' if memory == resource.RLIM_INFINITY else memory}"


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
