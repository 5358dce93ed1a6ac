"""The machine image of a node."""

from __future__ import annotations

import re
from dataclasses import dataclass

from aws_cdk import Annotations
from aws_cdk import aws_ssm as ssm

from constructs import Construct
from traincluster.instances import InstanceType

_DLAMI = "/aws/service/deeplearning/ami"
_DLAMI_PYTHON = "/opt/pytorch/bin/python"
_UBUNTU_ROOT = "/dev/sda1"
# The open-source NVIDIA driver of the deep-learning images needs a GPU of the Turing generation or later.
LEAST_DLAMI_VOLUME_GIB = 100
"""The least root volume for a deep-learning image: its snapshot, and room for packages and logs."""

_TOO_OLD_FOR_OPEN_DRIVER = ("V100",)


@dataclass(frozen=True, kw_only=True)
class NodeImage:
    """An image, and what a node has to know about it.

    Example:
        >>> NodeImage(ami="ami-0123456789abcdef0").is_pinned
        True
    """

    ami: str
    """Id of an image ("ami-..."), or name of the SSM parameter that holds one ("/aws/service/...")."""
    python: str = _DLAMI_PYTHON
    """The image's Python that has torch and boto3."""
    root_device: str = _UBUNTU_ROOT
    """Device name of the image's root volume: /dev/sda1 on Ubuntu, /dev/xvda on Amazon Linux. With a wrong one the node
    gets a second, unused volume and keeps a root volume of the image's own size."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"ami-[0-9a-f]{8,17}", self.ami) and not re.fullmatch(r"/[\w./-]+", self.ami):
            raise ValueError(
                f"ami is {self.ami!r}. Give the id of an image, such as 'ami-0123456789abcdef0', or the name of an SSM "
                "parameter that holds one, such as '/aws/service/deeplearning/ami/...'."
            )

    @property
    def is_pinned(self) -> bool:
        """Whether the image is the same at every deploy."""
        return self.ami.startswith("ami-")


def default_image(instance_type: InstanceType) -> NodeImage:
    """AWS's deep-learning image for a type, as the SSM parameter of its newest release.

    - CPU types and NVIDIA GPUs: the PyTorch image on Ubuntu 24.04, which has torch under /opt/pytorch. It starts on CPU
      types too: its driver finds no device there and torch runs on the CPU. The Base images have no torch.
    - Neuron: the PyTorch 2.9 image, the last with training support on Trainium (Neuron SDK 2.31 and before).

    Sources: docs.aws.amazon.com/dlami (find-dlami-id, release notes), AWS Neuron documentation (dlami).

    Raises:
        ValueError: no such image drives the type's accelerators.
    """
    accelerator = instance_type.accelerator
    if accelerator and accelerator.kind == "neuron":
        return NodeImage(
            ami="/aws/service/neuron/dlami/pytorch-2.9/ubuntu-24.04/latest/image_id",
            python="/opt/aws_neuronx_venv_pytorch_2_9/bin/python",
        )
    if accelerator and accelerator.name in _TOO_OLD_FOR_OPEN_DRIVER:
        raise ValueError(
            f"{instance_type.name} has {accelerator.name} GPUs, which the open NVIDIA driver of AWS's deep-learning images does "
            "not support. Give an image with the proprietary driver as ami, or choose a newer type, such as g4dn or p4d."
        )
    framework = "2.11" if instance_type.arch == "arm64" else "2.12"
    release = f"oss-nvidia-driver-gpu-pytorch-{framework}-ubuntu-24.04"
    return NodeImage(ami=f"{_DLAMI}/{instance_type.arch}/{release}/latest/ami-id")


def image_id(scope: Construct, image: NodeImage, *, instance_type: InstanceType) -> str:
    """The ImageId for a launch template; warns when it can change from one deploy to the next, or may not suit the type."""
    if image.is_pinned:
        return image.ami
    annotations = Annotations.of(scope)
    annotations.add_warning_v2(
        "traincluster:latestImage",
        f"The image is the newest of {image.ami}, looked up at each deploy: a deploy after a new release replaces the nodes, "
        "which then resume from the last checkpoint. Give the id of an image as ami to pin it.",
    )
    accelerator = instance_type.accelerator
    if accelerator and accelerator.kind == "nvidia" and not instance_type.pytorch_image_listed:
        annotations.add_warning_v2(
            "traincluster:unlistedImage",
            f"AWS does not list {instance_type.name} among the types of its PyTorch deep-learning image, whose driver may be "
            "too old for it. Give another image as ami if a node finds no GPU.",
        )
    return ssm.StringParameter.value_for_typed_string_parameter_v2(scope, image.ami, ssm.ParameterValueType.AWS_EC2_IMAGE_ID)


def root_volume_size(instance_type: InstanceType, wanted: int | None, *, image: NodeImage | None) -> int:
    """The size of the root volume in GiB.

    Args:
        instance_type: what the node is.
        wanted: the size asked for, or None for the default: 120, and 512 on Neuron types, whose compiled graphs are large
            (the AWS Neuron documentation advises it).
        image: the user's own image, or None when the node has one of AWS's deep-learning images.

    Raises:
        ValueError: too small for the deep-learning image.
    """
    accelerator = instance_type.accelerator
    if wanted is None:
        return 512 if accelerator and accelerator.kind == "neuron" else 120
    least = LEAST_DLAMI_VOLUME_GIB if image is None else 8
    if wanted < least:
        raise ValueError(
            f"root_volume_gib is {wanted}. Allowed: {least} or more. AWS's deep-learning images need "
            f"{LEAST_DLAMI_VOLUME_GIB}, or a node runs out of space while it boots."
        )
    return wanted
