"""Whether this node has a kernel to itself: what a container sets of the kernel, it sets for the whole machine."""

from __future__ import annotations

from pathlib import Path

from trainrun.node.places import Places

INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of linux/proc_ns.h: every other process namespace has another number."""


def has_own_kernel(
    places: Places, *, namespace: Path = Path("/proc/self/ns/pid"), systemd: Path = Path("/run/systemd/system")
) -> bool:
    """Whether this is a host, as an EC2 instance is, rather than a container, a local node or a plain process.

    A hypervisor does not tell: local nodes answer as EC2 instances do. The namespace of the processes does, together with
    systemd, which every image has and a machine without namespaces of its own for its containers has not.
    """
    if places.root != Path("/") or not systemd.is_dir():
        return False
    try:
        return str(namespace.readlink()) == INITIAL_PID_NAMESPACE
    except OSError:
        return False
