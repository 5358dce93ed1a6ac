"""Versions of driver, CUDA, NCCL and EFA: do they go together, and are they new enough for the instance type?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trainrun.node.checks.accelerators import neuron_driver
from trainrun.node.checks.output import output_of
from trainrun.node.outcome import StepFailed
from trainrun.spec import ClusterSpec

EFA_INSTALLED = Path("/opt/amazon/efa_installed_packages")


@dataclass(frozen=True, kw_only=True)
class Minimum:
    """The least versions with which a type works; "" where AWS names none."""

    driver: str = ""
    cuda: str = ""
    nccl: str = ""
    efa: str = ""
    """Of the EFA installer."""


MINIMUM = {
    "p5.4xlarge": Minimum(driver="530", cuda="12.1", nccl="2.18.3", efa="1.43.1"),
    "p5.": Minimum(driver="530", cuda="12.1", nccl="2.18.3", efa="1.24.1"),
    "p5e.": Minimum(driver="550", cuda="12.1"),
    "p5en.": Minimum(driver="550", cuda="12.1"),
    "p6-b200.": Minimum(driver="570", cuda="12.8", nccl="2.26.2", efa="1.41"),
    "p6e-gb200.": Minimum(driver="570", cuda="12.8", nccl="2.26.2", efa="1.41"),
    "p6-b300.": Minimum(driver="580", cuda="13.0", nccl="2.28.3", efa="1.44"),
    "g7e.": Minimum(driver="575", cuda="12.9", efa="1.45"),
    "g7.": Minimum(driver="595", cuda="13.2", nccl="2.29.7", efa="1.48.0"),
}
"""By the beginning of the type's name; the first that fits
(docs.aws.amazon.com/AWSEC2/latest/UserGuide/gpu-instances-started.html)."""


def minimum_of(instance_type: str) -> Minimum:
    """The least versions for a type."""
    return next((least for name, least in MINIMUM.items() if instance_type.startswith(name)), Minimum())


def check_driver(cluster: ClusterSpec) -> str:
    """Compare the version of the driver with the type's.

    Raises:
        StepFailed: there is no driver, or one that is too old.
    """
    if cluster.accelerator == "neuron":
        return f"Neuron driver {neuron_driver() or 'of a version that the kernel does not tell'}"
    if cluster.accelerator == "none":
        return "no driver needed"
    driver, cuda = driver_versions()
    if not driver:
        raise StepFailed(
            "nvidia-smi shows no driver. Take an image with NVIDIA's driver, such as AWS's deep-learning images; "
            "if it has one, see dmesg for why it is not loaded (a kernel that was upgraded, an instance type it does not know)."
        )
    least = minimum_of(cluster.instance_type)
    if least.driver and older(driver, least.driver):
        raise StepFailed(
            f"NVIDIA's driver is {driver}, and {cluster.instance_type} needs {least.driver} or newer. Take a newer image."
        )
    return f"driver {driver}, for CUDA up to {cuda or 'what nvidia-smi does not tell'}"


def efa_installer(installed: Path = EFA_INSTALLED) -> str:
    """The version of the EFA installer that this node's software is of; "" when it does not tell."""
    try:
        text = installed.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(r"EFA installer version: ([\d.]+)", text)
    return match[1] if match else ""


def check_efa_installer(cluster: ClusterSpec, *, installed: Path = EFA_INSTALLED) -> str:
    """Compare the version of the EFA installer with the type's, where the installer has left it.

    Raises:
        StepFailed: it is too old.
    """
    if not cluster.efa_interfaces:
        return "no EFA software needed"
    version = efa_installer(installed)
    if not version:
        return (
            f"{installed} names no version of the EFA installer"
            if installed.exists()
            else f"the EFA installer has left no {installed}"
        )
    least = minimum_of(cluster.instance_type)
    if least.efa and older(version, least.efa):
        raise StepFailed(
            f"The EFA software is of installer {version} ({installed}), and {cluster.instance_type} needs {least.efa} or newer. "
            "Take a newer image, or run the EFA installer in yours."
        )
    return f"EFA installer {version}"


def torch_problems(cluster: ClusterSpec, *, cuda: str, nccl: str) -> list[str]:
    """What is wrong with the versions that torch was built with.

    Within one major version of CUDA any driver of it serves all builds (NVIDIA's "minor version compatibility",
    docs.nvidia.com/deploy/cuda-compatibility/); a newer major version needs a newer driver.

    Args:
        cluster: what the node is.
        cuda: CUDA of torch; "" for a build without.
        nccl: NCCL of torch; "" when unknown.
    """
    if cluster.accelerator != "nvidia" or not cuda:
        return []
    problems = []
    driver, most = driver_versions()
    if most and numbers(cuda)[0] > numbers(most)[0]:
        problems.append(
            f"It was built with CUDA {cuda}, and the driver {driver} of this image goes up to CUDA {most}. "
            "Take an image with a newer driver, or a torch that was built for an older CUDA."
        )
    least = minimum_of(cluster.instance_type)
    for name, seen, needed in (("CUDA", cuda, least.cuda), ("NCCL", nccl, least.nccl)):
        if seen and needed and older(seen, needed):
            problems.append(
                f"It was built with {name} {seen}, and {cluster.instance_type} needs {needed} or newer. Take a newer torch."
            )
    return problems


def driver_versions() -> tuple[str, str]:
    """The driver's version, and the newest CUDA that it goes with, as nvidia-smi heads its table; "" where it does not tell."""
    table = output_of("nvidia-smi")
    driver = re.search(r"Driver Version: *([\d.]+)", table)
    cuda = re.search(r"CUDA (?:UMD )?Version: *([\d.]+)", table)
    return (driver[1] if driver else ""), (cuda[1] if cuda else "")


def older(version: str, than: str) -> bool:
    """Whether a version is older than another, as far as that says anything."""
    least = numbers(than)
    return numbers(version)[: len(least)] < least


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.26.2+cu" is (2, 26, 2)."""
    return tuple(int(part) for part in re.findall(r"\d+", re.match(r"[\d.]*", version)[0]))  # type: ignore[index]
