"""EFA interfaces, and the memory that they lock."""

from __future__ import annotations

import re
import resource
from pathlib import Path

from trainrun.node.checks.output import output_of
from trainrun.node.outcome import StepFailed
from trainrun.spec import ClusterSpec

INFINIBAND = Path("/sys/class/infiniband")
FI_INFO = "/opt/amazon/efa/bin/fi_info"


def check_efa(cluster: ClusterSpec, *, infiniband: Path = INFINIBAND, fi_info: str = FI_INFO) -> str:
    """Count the EFA interfaces: those of the kernel, and those that libfabric can use.

    Raises:
        StepFailed: another number than the RunSpec says.
    """
    if not cluster.efa_interfaces:
        return "no EFA expected"
    expected = f"the launch template asks for {cluster.efa_interfaces}"
    of_kernel = count_efa(infiniband=infiniband)
    listing = output_of(fi_info, "-p", "efa", "-t", "FI_EP_RDM")
    of_libfabric = len(set(re.findall(r"^\s*domain:\s*(\S+)", listing, flags=re.MULTILINE)))
    if of_kernel != cluster.efa_interfaces and not (of_kernel == 0 and of_libfabric == cluster.efa_interfaces):
        raise StepFailed(
            f"{infiniband} shows {of_kernel} EFA interfaces (fi_info: {of_libfabric}), {expected}. "
            "Is the EFA driver of the image loaded (lsmod | grep efa), and does the image support the instance type?"
        )
    if listing and of_libfabric != cluster.efa_interfaces:
        raise StepFailed(
            f"{fi_info} shows {of_libfabric} EFA interfaces, {expected} and the kernel has them. "
            "Are /dev/infiniband/uverbs* there and readable, and is the image's libfabric of its EFA driver's release?"
        )
    return f"{cluster.efa_interfaces} EFA interfaces" + ("" if listing else f" ({fi_info} tells nothing)")


def count_efa(*, infiniband: Path = INFINIBAND) -> int:
    """The EFA interfaces that the kernel shows."""
    return len(list(infiniband.iterdir())) if infiniband.is_dir() else 0


def check_locked_memory(cluster: ClusterSpec) -> str:
    """See that memory can be locked without limit, as EFA needs it.

    Raises:
        StepFailed: it cannot.
    """
    if not cluster.efa_interfaces:
        return "no locked memory needed"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY:
        raise StepFailed(
            f"At most {limit} bytes of memory can be locked here, EFA needs no limit (else: Libfabric error -12). The node "
            "agent's unit has LimitMEMLOCK=infinity; in a shell: ulimit -l unlimited; in a container: --ulimit memlock=-1."
        )
    return "locked memory unlimited"
