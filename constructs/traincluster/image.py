"""The machine image of a node."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from aws_cdk import Aws, CfnMapping, Stack, Token
from aws_cdk import aws_ssm as ssm

from constructs import Construct
from traincluster.instances import InstanceType
from traincluster.instances import instance_type as look_up
from traincluster.rules.image import ROOT_DEVICES, ImageFacts, OperatingSystem
from traincluster.rules.report import known

PINS_CONTEXT = "traincluster:images"
"""Key of the CDK context, in cdk.context.json, under which images are pinned: region -> SSM parameter -> id of an image."""

_DLAMI = "/aws/service/deeplearning/ami"
_DLAMI_PYTHON = "/opt/pytorch/bin/python"
_AMI = re.compile(r"ami-[0-9a-f]{8,17}")

# The newest PyTorch image of each operating system, by the DLAMI release notes. AWS publishes none after 2.7 on Ubuntu 22.04.
_PYTORCH = {
    ("ubuntu-22.04", "x86_64"): "2.7",
    ("ubuntu-22.04", "arm64"): "2.7",
    ("ubuntu-24.04", "x86_64"): "2.12",
    ("ubuntu-24.04", "arm64"): "2.11",
    ("amazon-linux-2023", "x86_64"): "2.12",
    ("amazon-linux-2023", "arm64"): "2.12",
}


@dataclass(frozen=True, kw_only=True)
class NodeImage:
    """An image, and what a node has to know about it.

    Any image will do that has cloud-init, bash, xz and a Python with torch and boto3, and for accelerators their driver. AWS's
    deep-learning images have all of it (`for_type`). There is none of Red Hat Enterprise Linux: an image of RHEL 8 or 9 is one
    of your own, and a rule says what it must hold.

    Example:
        >>> NodeImage(ami="ami-0123456789abcdef0", os="amazon-linux-2023").root_device_name
        '/dev/xvda'
        >>> NodeImage.for_type("g6e.48xlarge", os="amazon-linux-2023").ami
        '/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.12-amazon-linux-2023/latest/ami-id'
    """

    ami: str
    """Id of an image ("ami-..."), or name of the SSM parameter that holds one ("/aws/service/...")."""
    os: OperatingSystem = "ubuntu-24.04"
    """The image's operating system."""
    python: str = _DLAMI_PYTHON
    """The image's Python that has torch and boto3."""
    root_device: str | None = None
    """Device name of the image's root volume; None means the one that images of the operating system have. With a wrong one
    the node gets a second, unused volume and keeps a root volume of the image's own size."""
    arch: Literal["x86_64", "arm64"] | None = None
    """Processor that the image is built for; None means as its parameter's name says, and else that it is not checked."""

    def __post_init__(self) -> None:
        if self.os not in ROOT_DEVICES:
            raise ValueError(f"os is {self.os!r}. Allowed: {', '.join(map(repr, ROOT_DEVICES))}.")
        if Token.is_unresolved(self.ami):
            return
        if not _AMI.fullmatch(self.ami) and not re.fullmatch(r"/[\w./-]+", self.ami):
            raise ValueError(
                f"ami is {self.ami!r}. Give the id of an image, such as 'ami-0123456789abcdef0', or the name of an SSM "
                "parameter that holds one, such as '/aws/service/deeplearning/ami/...'."
            )

    @classmethod
    def for_type(cls, instance_type: str, *, os: OperatingSystem = "ubuntu-24.04") -> NodeImage:
        """AWS's deep-learning image for an instance type and an operating system.

        Raises:
            ValueError: an unknown type, or there is no such image.
        """
        return default_image(look_up(instance_type), os=os)

    @property
    def is_parameter(self) -> bool:
        """Whether the image is named by an SSM parameter rather than by its id."""
        return self.ami.startswith("/")

    @property
    def is_deep_learning(self) -> bool:
        """Whether it is one of AWS's deep-learning images."""
        return self.ami.startswith("/aws/service/")

    @property
    def root_device_name(self) -> str:
        """Device name of the root volume."""
        return self.root_device or ROOT_DEVICES[self.os]

    def facts(self, instance_type: InstanceType, *, pinned: bool, efa: bool, root_volume_gib: int) -> ImageFacts:
        """What the rules look at."""
        named = re.search(r"/(x86_64|arm64)/", self.ami)
        return ImageFacts(
            type=instance_type,
            ami=known(self.ami),
            pinned=pinned,
            os=self.os,
            arch=self.arch or (named[1] if named else None),
            root_device=known(self.root_device),
            root_volume_gib=root_volume_gib,
            efa=efa,
        )


def default_image(instance_type: InstanceType, *, os: OperatingSystem = "ubuntu-24.04") -> NodeImage:
    """AWS's deep-learning image for a type, as the SSM parameter of its newest release.

    - CPU types and NVIDIA GPUs: the PyTorch image, which has torch under /opt/pytorch. It starts on CPU types too: its driver
      finds no device there and torch runs on the CPU. The Base images have no torch.
    - Neuron: the PyTorch 2.9 image, the last with training support on Trainium (Neuron SDK 2.31 and before).

    Sources: docs.aws.amazon.com/dlami (find-dlami-id, release notes), AWS Neuron documentation (dlami).

    Raises:
        ValueError: AWS publishes no such image of the operating system.
    """
    accelerator = instance_type.accelerator
    if accelerator and accelerator.kind == "neuron":
        if os != "ubuntu-24.04":
            raise ValueError(
                f"os is {os!r}, but AWS's Neuron image with PyTorch for {instance_type.name} is of Ubuntu 24.04 only. "
                "Use ubuntu-24.04, or give an image of your own as ami."
            )
        return NodeImage(
            ami="/aws/service/neuron/dlami/pytorch-2.9/ubuntu-24.04/latest/image_id",
            python="/opt/aws_neuronx_venv_pytorch_2_9/bin/python",
        )
    framework = _PYTORCH.get((os, instance_type.arch))
    if framework is None:
        raise ValueError(
            f"os is {os!r}, of which AWS publishes no deep-learning image. Give an image of your own as ami, or choose one of "
            f"{', '.join(sorted({system for system, _ in _PYTORCH}))}."
        )
    release = f"oss-nvidia-driver-gpu-pytorch-{framework}-{os}"
    return NodeImage(ami=f"{_DLAMI}/{instance_type.arch}/{release}/latest/ami-id", os=os)


@dataclass(frozen=True)
class Resolved:
    """An image as the launch template has it."""

    image_id: str
    pinned: bool
    """Whether a deploy of the same code always has the same image."""


def resolve(scope: Construct, image: NodeImage) -> Resolved:
    """The ImageId for a launch template.

    A parameter is pinned by the CDK context, where `traincluster pin-image` writes the image's id for each region; one that is
    not is looked up by CloudFormation at each deploy. A stack that learns its region at deploy takes the pin of that region, so
    that it can be deployed only where there is one.

    Raises:
        ValueError: pins in the context that are not what the command writes.
    """
    if not image.is_parameter:
        return Resolved(image.ami, pinned=True)
    pins = pins_of(scope.node.try_get_context(PINS_CONTEXT), image.ami)
    region = known(Stack.of(scope).region)
    if region in pins:
        return Resolved(pins[region], pinned=True)
    if region is None and pins:
        mapping = CfnMapping(scope, "Images", mapping={name: {"ami": ami} for name, ami in pins.items()})
        return Resolved(mapping.find_in_map(Aws.REGION, "ami"), pinned=True)
    latest = ssm.StringParameter.value_for_typed_string_parameter_v2
    return Resolved(latest(scope, image.ami, ssm.ParameterValueType.AWS_EC2_IMAGE_ID), pinned=False)


def pins_of(context: Any, parameter: str) -> dict[str, str]:
    """The pinned images of a parameter, by region, out of the context's value.

    Raises:
        ValueError: it is not a mapping of regions to mappings of parameters to ids of images.
    """
    regions = {} if context is None else context
    well_formed = isinstance(regions, dict) and all(
        isinstance(pins, dict) and all(isinstance(ami, str) and _AMI.fullmatch(ami) for ami in pins.values())
        for pins in regions.values()
    )
    if not well_formed:
        raise ValueError(
            f"The context {PINS_CONTEXT!r} is {context!r}. It maps regions to parameters to ids of images; write it by "
            "`traincluster pin-image`, or remove it."
        )
    return {region: pins[parameter] for region, pins in sorted(regions.items()) if parameter in pins}


def root_volume_size(instance_type: InstanceType, wanted: int | None) -> int:
    """The size of the root volume in GiB: as wanted, or 120, or 512 on Neuron types, whose compiled graphs are large.

    The AWS Neuron documentation advises 512.
    """
    accelerator = instance_type.accelerator
    if wanted is None:
        return 512 if accelerator and accelerator.kind == "neuron" else 120
    return wanted
