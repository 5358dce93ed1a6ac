"""Huge pages, which libfabric's EFA provider takes its buffers from. The EFA installer reserves them; not every image ran it."""

from __future__ import annotations

import re
from pathlib import Path

from trainrun.node.substeps import Done

PAGES = 5128
"""Of 2 MiB each: as many as AWS's images for EKS reserve (docs.aws.amazon.com/eks/latest/userguide/node-efa.html)."""


def reserve_huge_pages(*, efa: bool, own_kernel: bool, proc: Path = Path("/proc")) -> Done:
    """Reserve huge pages where EFA is expected and none are. Without them EFA works, by ordinary pages.

    Args:
        efa: whether the node is to have EFA.
        own_kernel: whether this node may set its kernel (`has_own_kernel`).
        proc: where the kernel tells of itself.
    """
    if not efa:
        return Done("none needed without EFA")
    there, kib = _reserved(proc)
    if there:
        return Done(f"{there} of {kib // 1024} MiB reserved by the image")
    if not own_kernel:
        return Done("none reserved, and the kernel is not this node's alone")
    try:
        (proc / "sys/vm/nr_hugepages").write_text(f"{PAGES}\n", encoding="ascii")
    except OSError as error:
        return Done(f"none reserved: {error.strerror}")
    there, kib = _reserved(proc)
    return Done(f"{there} of {kib // 1024} MiB reserved", changed=there > 0)


def _reserved(proc: Path) -> tuple[int, int]:
    """How many there are, and the size of one in KiB."""
    try:
        text = (proc / "meminfo").read_text(encoding="ascii")
    except OSError:
        text = ""
    found = {name: int(number) for name, number in re.findall(r"^(HugePages_Total|Hugepagesize):\s+(\d+)", text, re.MULTILINE)}
    return found.get("HugePages_Total", 0), found.get("Hugepagesize", 0)
