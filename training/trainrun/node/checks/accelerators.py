"""How many accelerators a node has."""

from __future__ import annotations

import json
import re
from pathlib import Path

from trainrun.node.checks.output import output_of
from trainrun.node.outcome import StepFailed
from trainrun.spec import ClusterSpec

NEURON_LS = "/opt/aws/neuron/bin/neuron-ls"
NEURON_DRIVER = Path("/sys/module/neuron/version")


def check_accelerators(cluster: ClusterSpec, *, devices: Path = Path("/dev"), neuron_ls: str = NEURON_LS) -> str:
    """Count the accelerators; on a CPU node nothing is looked for.

    Raises:
        StepFailed: another number than the instance type has.
    """
    if cluster.accelerator == "none":
        return "no accelerators expected"
    if cluster.accelerator == "nvidia":
        seen, listing = count_gpus()
        source, hint = f"nvidia-smi -L shows ({listing.strip() or 'nothing'})", "See dmesg for NVRM and Xid lines"
    else:
        seen = count_neuron(devices=devices)
        source, hint = "/dev/neuron* shows", "See dmesg for neuron lines, and whether the image has the Neuron driver"
    if seen != cluster.accelerators_per_node:
        raise StepFailed(
            f"{source} {seen} accelerators, {cluster.instance_type} has {cluster.accelerators_per_node}. "
            f"{hint}; replace the instance if a reboot does not bring them back."
        )
    if cluster.accelerator == "neuron":
        _check_neuron_ls(seen, neuron_ls=neuron_ls)
    return f"{seen} accelerators"


def count_gpus() -> tuple[int, str]:
    """The GPUs that the driver shows, and its listing of them."""
    listing = output_of("nvidia-smi", "-L")
    return len(re.findall(r"^GPU \d+:", listing, flags=re.MULTILINE)), listing


def count_neuron(*, devices: Path = Path("/dev")) -> int:
    """The Neuron devices that the driver shows."""
    return len([d for d in devices.glob("neuron*") if re.fullmatch(r"neuron\d+", d.name)])


def neuron_driver(*, version: Path = NEURON_DRIVER) -> str:
    """The version of the Neuron driver that is loaded; empty where the kernel does not tell."""
    try:
        return version.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _check_neuron_ls(expected: int, *, neuron_ls: str) -> None:
    """Compare with the Neuron tools' own count, where the image has them.

    Raises:
        StepFailed: they show another number.
    """
    listing = output_of(neuron_ls, "--json-output")
    if not listing:
        return
    try:
        seen = len(json.loads(listing))
    except ValueError:
        return
    if seen != expected:
        raise StepFailed(
            f"{neuron_ls} shows {seen} Neuron devices, the driver {expected}. The driver and the runtime of the image have to "
            "be of one Neuron release; replace the instance if they are."
        )
