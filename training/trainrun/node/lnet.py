"""Lustre's network by EFA.

Set up wrongly, Lustre goes by TCP without a word; so what has been set up is counted.
Source: docs.aws.amazon.com/fsx/latest/LustreGuide/configure-efa-clients.html
"""

from __future__ import annotations

import re
from pathlib import Path

from trainrun.node.commands import Run
from trainrun.node.outcome import StepFailed

PEER_CREDITS = 32
MANY = 32
"""Devices of a p5 or p5e, four to a PCI bus."""


def use_efa(interface: str, *, run: Run, devices: Path = Path("/sys/class/infiniband")) -> str:
    """Have Lustre prefer EFA. May run again. Returns what was done.

    Args:
        interface: the primary network interface, by which connections are set up.
        run: runs commands.
        devices: where the kernel lists EFA devices.

    Raises:
        StepFailed: no EFA device, no Lustre module for EFA, or fewer interfaces than were added.
    """
    chosen = choose([device.name for device in devices.iterdir()] if devices.is_dir() else [])
    if not chosen:
        raise StepFailed(f"The Lustre file system is to be reached by EFA, but {devices} shows no EFA device.")
    try:
        run("modprobe", "lnet")
        run("modprobe", "kefalnd", f"ipif_name={interface}")
        run("modprobe", "ksocklnd")
    except StepFailed as failure:
        raise StepFailed(
            f"The Lustre client of the image cannot use EFA: {failure} It takes Lustre 2.15 with kefalnd and an EFA driver of "
            "2.12.1 or later. Set efa of the file system to false to reach it by TCP."
        ) from None
    run("lnetctl", "lnet", "configure")
    if not _present("tcp", run):
        run("lnetctl", "net", "add", "--net", "tcp", "--if", interface)
    if not _present("efa", run):
        for device in chosen:
            run("lnetctl", "net", "add", "--net", "efa", "--if", device, "--peer-credits", str(PEER_CREDITS))
        run("lnetctl", "set", "discovery", "1")
        run("lnetctl", "udsp", "add", "--src", "efa", "--priority", "0")
    seen = _present("efa", run)
    if seen < len(chosen):
        raise StepFailed(f"LNet shows {seen} EFA interfaces after {len(chosen)} were added; Lustre would go by TCP.")
    return f"{seen} EFA interfaces"


def choose(devices: list[str]) -> list[str]:
    """The devices that Lustre uses: one for each PCI bus of a p5, the first and the last of other types."""
    ordered = sorted(devices, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])
    if len(ordered) >= MANY:
        return ordered[::4]
    return list(dict.fromkeys([ordered[0], ordered[-1]])) if ordered else []


def _present(net: str, run: Run) -> int:
    """How many interfaces LNet has in a network."""
    try:
        return len(re.findall(rf"nid: \S+@{net}\b", run("lnetctl", "net", "show", "--net", net)))
    except StepFailed:  # LNet's way of saying that there is no such network
        return 0
