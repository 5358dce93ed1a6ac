"""The machine images of the Deep Learning and Neuron AMI families, and the public SSM parameters that name them.

The parameter names are those of the AWS pages "Find the DLAMI ID" and of the Neuron DLAMI documentation. The image ids are
made up from name and region, and each is a real image of the emulated EC2. The images hold nothing: on this machine the
repository's own environment plays the image.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from moto.core.utils import utcnow
from moto.ec2.models.amis import Ami, AmiBackend
from moto.ssm.models import Parameter, ParameterDict

from trainlocal.cloud.services.amending import amend

_DLAMI = "/aws/service/deeplearning/ami"
_NEURON = "/aws/service/neuron/dlami"
_SYSTEMS = ("ubuntu-22.04", "ubuntu-24.04", "amazon-linux-2023")


@dataclass(frozen=True, kw_only=True)
class PublicImage:
    """An image that AWS publishes and the SSM parameter that holds its id."""

    parameter: str
    name: str
    architecture: str = "x86_64"

    def image_id(self, region: str) -> str:
        """The id in one region, the same in every run."""
        return "ami-" + hashlib.sha256(f"{region}{self.parameter}".encode()).hexdigest()[:17]


def public_images() -> tuple[PublicImage, ...]:
    """Every image that is seeded."""
    deep_learning = [
        *(f"base-oss-nvidia-driver-gpu-{system}" for system in _SYSTEMS),
        *(f"base-with-single-cuda-{system}" for system in _SYSTEMS),
        *(
            f"oss-nvidia-driver-gpu-pytorch-2.{minor}-{system}"
            for minor in range(7, 13)
            for system in ("ubuntu-22.04", "ubuntu-24.04", "amazon-linux-2023")
        ),
        "oss-nvidia-driver-gpu-pytorch-2.13-ubuntu-26.04",
    ]
    neuron = [
        f"{kind}/{system}"
        for kind in ("multi-framework", "base", "jax-0.10", "pytorch-2.9", "pytorch-inference-vllm-0.24.0.1.1.0")
        for system in ("ubuntu-24.04", "amazon-linux-2023")
    ]
    return (
        *(
            PublicImage(
                parameter=f"{_DLAMI}/{architecture}/{kind}/latest/ami-id",
                name=f"Deep Learning {kind} {architecture}",
                architecture=architecture,
            )
            for kind in deep_learning
            for architecture in ("x86_64", "arm64")
        ),
        *(PublicImage(parameter=f"{_NEURON}/{kind}/latest/image_id", name=f"Deep Learning Neuron {kind}") for kind in neuron),
    )


def install() -> None:
    """Adds the images to every region's EC2 and their parameters to its SSM, when the region is first used."""
    amend(AmiBackend, "_load_amis", _load_images)
    amend(ParameterDict, "_check_loading_status", _load_parameters)


_load_moto_images = AmiBackend._load_amis
_check_moto_parameters = ParameterDict._check_loading_status


def _load_images(backend: Any) -> None:
    _load_moto_images(backend)
    for image in public_images():
        image_id = image.image_id(backend.region_name)
        backend.amis[image_id] = Ami(
            backend,
            image_id,
            name=image.name,
            description=image.name,
            owner_id="898082745236",
            owner_alias="amazon",
            public=True,
            virtualization_type="hvm",
            architecture=image.architecture,
            root_device_type="ebs",
            root_device_name="/dev/sda1" if "ubuntu" in image.parameter else "/dev/xvda",
            hypervisor="xen",
            region_name=f"{backend.region_name}a",
        )


def _load_parameters(parameters: ParameterDict, key: str) -> None:
    _check_moto_parameters(parameters, key)
    if not str(key or "").startswith((_DLAMI, _NEURON)):
        return
    for image in public_images():
        if dict.__contains__(parameters, image.parameter):
            return  # all were added at once
        dict.__setitem__(parameters, image.parameter, [_parameter(parameters, image)])


def _parameter(parameters: ParameterDict, image: PublicImage) -> Any:
    make: Any = Parameter  # moto leaves two of its abstract methods open
    return make(
        account_id=parameters.account_id,
        name=image.parameter,
        value=image.image_id(parameters.region_name),
        parameter_type="String",
        description=None,
        allowed_pattern=None,
        keyid=None,
        last_modified_date=utcnow(),
        version=1,
        data_type="aws:ec2:image",
    )
