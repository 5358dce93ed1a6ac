"""What can go wrong with a node's machine image."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from traincluster.instances import InstanceType
from traincluster.rules.engine import rule
from traincluster.rules.finding import Finding

OperatingSystem = Literal["ubuntu-22.04", "ubuntu-24.04", "amazon-linux-2023", "rhel-8", "rhel-9"]

ROOT_DEVICES: dict[OperatingSystem, str] = {
    "ubuntu-22.04": "/dev/sda1",
    "ubuntu-24.04": "/dev/sda1",
    "amazon-linux-2023": "/dev/xvda",
    "rhel-8": "/dev/sda1",
    "rhel-9": "/dev/sda1",
}
"""The root device of the publisher's own images, which an image made from one of them keeps."""

TOO_OLD_FOR_OPEN_DRIVER = ("V100",)
"""GPUs before Turing, which NVIDIA's open kernel modules leave out."""

PATCHES_ENDED = {"2.6": "2026-01-29", "2.7": "2026-04-23", "2.8": "2026-08-06", "2.9": "2026-10-15"}
"""Versions of the PyTorch images that AWS publishes no more, and since when."""

RHEL_NEEDS = (
    "NVIDIA's driver, and its fabric manager on types with NVSwitch",
    "Python 3.10 or later with torch and boto3, named as the image's python",
    "cloud-init, the SSM agent and xz",
    "with EFA: the EFA installer and the aws-ofi-nccl plugin",
    "with FSx for Lustre in an isolated network: kmod-lustre-client of the FSx repository, for the very kernel",
)
"""What a Red Hat image must hold, since AWS publishes no deep-learning image of it."""

LEAST_ROOT_VOLUME_GIB = 8
LEAST_DLAMI_VOLUME_GIB = 100
"""The least root volume for a deep-learning image: its snapshot, and room for packages and logs."""

_DLAMI = "docs.aws.amazon.com/dlami (find-dlami-id, release notes)"


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """A node's image, and the node."""

    type: InstanceType
    ami: str | None
    """Id of an image, or name of the SSM parameter that holds one."""
    pinned: bool
    """Whether the same image is used at every deploy."""
    os: OperatingSystem
    arch: str | None
    """Processor architecture of the image."""
    root_device: str | None
    """Device name of its root volume, where the user gives one."""
    root_volume_gib: int
    efa: bool

    @property
    def is_aws_nvidia(self) -> bool:
        """One of AWS's deep-learning images, all of which have NVIDIA's open driver."""
        return self.ami is not None and self.ami.startswith("/aws/service/deeplearning/")

    @property
    def is_aws_neuron(self) -> bool:
        return self.ami is not None and self.ami.startswith("/aws/service/neuron/")


@rule(
    "image-is-pinned",
    summary="The image stays the same from one deploy to the next.",
    source="aws/aws-cdk#5675, #12355, #38069 (SYN-03, SYN-08)",
    levels=("warning",),
)
def image_is_pinned(facts: ImageFacts) -> Iterator[Finding]:
    if not facts.pinned and facts.ami is not None:
        yield Finding(
            "warning",
            "image-is-pinned",
            f"The image is the newest of {facts.ami}, looked up at each deploy: a deploy after a new release replaces the nodes, "
            "which then resume from the last checkpoint.",
            f"Pin it by `traincluster pin-image --parameter {facts.ami} --region REGION`, or give the id of an image as ami.",
        )


@rule(
    "image-lists-type",
    summary="AWS lists the instance type among those of its PyTorch deep-learning image.",
    source=_DLAMI,
    levels=("warning",),
)
def image_lists_type(facts: ImageFacts) -> Iterator[Finding]:
    accelerator = facts.type.accelerator
    if not facts.is_aws_nvidia or accelerator is None or accelerator.kind != "nvidia" or facts.type.pytorch_image_listed:
        return
    if accelerator.name not in TOO_OLD_FOR_OPEN_DRIVER:
        yield Finding(
            "warning",
            "image-lists-type",
            f"AWS does not list {facts.type.name} among the types of its PyTorch deep-learning image, whose driver may be too "
            "old for it.",
            "Give another image as ami if a node finds no GPU.",
        )


@rule(
    "open-driver-needs-turing",
    summary="The GPU is of the Turing generation or later when the image has NVIDIA's open driver.",
    source="NVIDIA open kernel modules (supported GPUs), aws/aws-parallelcluster#6014 (BOOT-04)",
)
def open_driver_needs_turing(facts: ImageFacts) -> Iterator[Finding]:
    accelerator = facts.type.accelerator
    if facts.is_aws_nvidia and accelerator and accelerator.name in TOO_OLD_FOR_OPEN_DRIVER:
        yield Finding(
            "error",
            "open-driver-needs-turing",
            f"{facts.type.name} has {accelerator.name} GPUs, which the open NVIDIA driver of AWS's deep-learning images does not "
            "support.",
            "Give an image with the proprietary driver as ami, or choose a newer type, such as g4dn or p4d.",
        )


@rule(
    "image-drives-accelerator",
    summary="A type with NVIDIA GPUs has an NVIDIA image, one with Trainium or Inferentia a Neuron image.",
    source="aws-parallelcluster InstanceTypeAcceleratorManufacturerValidator (BOOT-04)",
)
def image_drives_accelerator(facts: ImageFacts) -> Iterator[Finding]:
    accelerator = facts.type.accelerator
    if accelerator is None:
        return
    if (accelerator.kind == "neuron" and facts.is_aws_nvidia) or (accelerator.kind == "nvidia" and facts.is_aws_neuron):
        yield Finding(
            "error",
            "image-drives-accelerator",
            f"{facts.type.name} has {accelerator.name}, for which the image {facts.ami} has no driver.",
            "Leave ami out, which finds the right image, or give one with the driver.",
        )


@rule(
    "image-has-architecture",
    summary="The image is built for the processor of the instance type.",
    source="aws-parallelcluster InstanceArchitectureCompatibilityValidator",
)
def image_has_architecture(facts: ImageFacts) -> Iterator[Finding]:
    if facts.arch is not None and facts.arch != facts.type.arch:
        yield Finding(
            "error",
            "image-has-architecture",
            f"The image {facts.ami or ''} is built for {facts.arch}, but {facts.type.name} has a processor of {facts.type.arch}.",
            f"Give an image for {facts.type.arch}.",
        )


@rule(
    "image-root-device",
    summary="The root device is the one that the image's operating system has.",
    source="docs.aws.amazon.com/AWSEC2/latest/UserGuide/device_naming.html",
    levels=("warning",),
)
def image_root_device(facts: ImageFacts) -> Iterator[Finding]:
    usual = ROOT_DEVICES[facts.os]
    if facts.root_device is not None and facts.root_device != usual:
        yield Finding(
            "warning",
            "image-root-device",
            f"root_device is {facts.root_device!r}, but images of {facts.os} have {usual!r}. With a wrong one a node gets a "
            "second, unused volume and keeps a root volume of the image's own size.",
            "Compare it with RootDeviceName of `aws ec2 describe-images`.",
        )


@rule(
    "root-volume-holds-image",
    summary="The root volume is no smaller than the image, and has room for packages and logs.",
    source="docs.aws.amazon.com/dlami, aws-neuron/aws-neuron-sdk#579, aws/deep-learning-containers#2425 (STO-10)",
)
def root_volume_holds_image(facts: ImageFacts) -> Iterator[Finding]:
    from_aws = facts.is_aws_nvidia or facts.is_aws_neuron
    least = LEAST_DLAMI_VOLUME_GIB if from_aws else LEAST_ROOT_VOLUME_GIB
    if facts.root_volume_gib < least:
        why = "AWS's deep-learning images need it, or a node runs out of space while it boots." if from_aws else ""
        yield Finding(
            "error",
            "root-volume-holds-image",
            f"root_volume_gib is {facts.root_volume_gib}. Allowed: {least} or more. {why}".rstrip(),
            "Raise root_volume_gib, or leave it out.",
        )


@rule(
    "image-os-supports-type",
    summary="The operating system runs on the instance type.",
    source="aws-parallelcluster InstanceTypeOSCompatibleValidator",
)
def image_os_supports_type(facts: ImageFacts) -> Iterator[Finding]:
    if facts.type.name.startswith("p6e-") and facts.os.startswith("rhel-"):
        yield Finding(
            "error",
            "image-os-supports-type",
            f"os is {facts.os!r}, which does not support {facts.type.name}.",
            "Use an image of Ubuntu or Amazon Linux 2023.",
        )


@rule(
    "image-is-patched",
    summary="AWS still publishes new releases of the deep-learning image.",
    source="docs.aws.amazon.com/dlami/latest/devguide/dlami-support-policy-table.html",
    levels=("warning",),
)
def image_is_patched(facts: ImageFacts) -> Iterator[Finding]:
    version = re.search(r"-pytorch-(\d+\.\d+)-", facts.ami or "")
    if facts.is_aws_nvidia and version and version[1] in PATCHES_ENDED:
        yield Finding(
            "warning",
            "image-is-patched",
            f"AWS publishes no new releases of its PyTorch {version[1]} image since {PATCHES_ENDED[version[1]]}: it gets no "
            "security updates. There is no later one of Ubuntu 22.04.",
            "Use ubuntu-24.04 or amazon-linux-2023 as os.",
        )


@rule(
    "neuron-image-is-the-last",
    summary="AWS's Neuron image with PyTorch 2.9 is the last that trains with PyTorch.",
    source="AWS Neuron documentation (announce-no-support-pytorch-xla-training, SDK 2.30)",
    levels=("info",),
)
def neuron_image_is_the_last(facts: ImageFacts) -> Iterator[Finding]:
    if facts.is_aws_neuron and "/pytorch-2.9/" in (facts.ami or ""):
        yield Finding(
            "info",
            "neuron-image-is-the-last",
            "The Neuron image with PyTorch 2.9 is the last with support for training: later releases of the Neuron SDK train "
            "with JAX, or with a PyTorch that AWS has not published yet.",
            "Nothing is to be done now; a newer image would not train.",
        )


@rule(
    "rhel-image-is-complete",
    summary="A Red Hat image holds what AWS's deep-learning images bring: " + "; ".join(RHEL_NEEDS) + ".",
    source="docs.aws.amazon.com/dlami (no DLAMI of RHEL), docs.aws.amazon.com/fsx (install-lustre-client)",
    levels=("warning",),
)
def rhel_image_is_complete(facts: ImageFacts) -> Iterator[Finding]:
    if facts.os.startswith("rhel-"):
        yield Finding(
            "warning",
            "rhel-image-is-complete",
            f"AWS publishes no deep-learning image of {facts.os}. Yours needs: {'; '.join(RHEL_NEEDS)}.",
            "Acknowledge this when it has them.",
        )


@rule(
    "rhel-8-builds-nccl-plugin",
    summary="On RHEL 8 the plugin that lets NCCL use EFA is built from source.",
    source="docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-changelog.html (libnccl-ofi packages: RHEL 9 and 10)",
    levels=("warning",),
)
def rhel_8_builds_nccl_plugin(facts: ImageFacts) -> Iterator[Finding]:
    if facts.os == "rhel-8" and facts.efa:
        yield Finding(
            "warning",
            "rhel-8-builds-nccl-plugin",
            "The EFA installer packages the aws-ofi-nccl plugin for RHEL 9 and later only: without it NCCL falls back to TCP and "
            "says nothing.",
            "Build the plugin from source into the image, or use RHEL 9.",
        )
