"""What EC2 refuses when an instance is launched from a launch template.

Sources: the EC2 API reference of RunInstances and its error codes; the EC2 user guide on network cards, on EFA ("limitations")
and on user data (16 KB, raw). Interface limits are those of moto's DescribeInstanceTypes data.
"""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any

from moto.core.types import Base64EncodedString
from moto.ec2.models.instance_types import INSTANCE_TYPES
from moto.iam.models import iam_backends
from moto.utilities.utils import get_partition

from trainlocal.cloud.services.placement_groups import placement_groups

USER_DATA_BYTES = 16_384
INTERFACE_TYPES = ("interface", "efa", "efa-only")


class LaunchRefused(Exception):
    """EC2 would refuse the launch; ``message`` says why in its words."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def check_launch(
    backend: Any, data: dict[str, Any], *, subnet: Any, user_data: Base64EncodedString | None, placement_group: str | None
) -> None:
    """Raises ``LaunchRefused`` at the first thing in a launch template's ``data`` that EC2 would not launch."""
    _check_image(backend, data)
    _check_user_data(user_data)
    _check_interfaces(data, subnet)
    _check_cards(data)
    _check_groups(backend, data, subnet)
    _check_placement(backend, data, placement_group)
    _check_profile(backend, data)


def _check_image(backend: Any, data: dict[str, Any]) -> None:
    for name in ("ImageId", "InstanceType"):
        if not data.get(name):
            raise LaunchRefused(f"The request must contain the parameter {name}.")
    image = backend.amis.get(data["ImageId"])
    if image is None:
        raise LaunchRefused(f"The image id '[{data['ImageId']}]' does not exist.")
    offered = INSTANCE_TYPES.get(data["InstanceType"])
    if offered is None:
        raise LaunchRefused(f"Invalid value '{data['InstanceType']}' for InstanceType.")
    architectures = offered["ProcessorInfo"]["SupportedArchitectures"]
    if image.architecture not in architectures:
        raise LaunchRefused(
            f"The architecture '{','.join(architectures)}' of the specified instance type does not match the architecture "
            f"'{image.architecture}' of the specified AMI."
        )


def _check_user_data(user_data: Base64EncodedString | None) -> None:
    if user_data is None:
        return
    size = len(base64.b64decode(str(user_data)))
    if size > USER_DATA_BYTES:
        raise LaunchRefused(f"User data is limited to {USER_DATA_BYTES} bytes; it has {size}.")


def _check_interfaces(data: dict[str, Any], subnet: Any) -> None:
    interfaces = data.get("NetworkInterfaces", [])
    if not interfaces:
        return
    if data.get("SecurityGroupIds") or data.get("SecurityGroups"):
        raise LaunchRefused("Network interfaces and an instance-level security groups may not be specified on the same request.")
    if len(interfaces) > 1 and any(interface.get("AssociatePublicIpAddress") is not None for interface in interfaces):
        raise LaunchRefused(
            "The associatePublicIPAddress parameter cannot be specified when launching with multiple network interfaces."
        )
    for interface in interfaces:
        if interface.get("DeviceIndex") is None:
            raise LaunchRefused("Each network interface requires a device index.")
        if interface.get("SubnetId") not in (None, subnet.id):
            raise LaunchRefused("Network interfaces and an instance-level subnet ID may not be specified on the same request.")
        if interface.get("InterfaceType", "interface") not in INTERFACE_TYPES:
            raise LaunchRefused(f"Invalid value '{interface['InterfaceType']}' for InterfaceType.")


def _check_cards(data: dict[str, Any]) -> None:
    interfaces = data.get("NetworkInterfaces", [])
    instance_type = data["InstanceType"]
    network = INSTANCE_TYPES[instance_type]["NetworkInfo"]
    limits = {card["NetworkCardIndex"]: card["MaximumNetworkInterfaces"] for card in network["NetworkCards"]}
    slots = [(int(interface.get("NetworkCardIndex") or 0), int(interface["DeviceIndex"])) for interface in interfaces]
    for card, device in slots:
        if card not in limits:
            raise LaunchRefused(f"Network card index {card} is not available on {instance_type}, which has {len(limits)} cards.")
        if device >= limits[card]:
            raise LaunchRefused(
                f"Invalid value '{device}' for DeviceIndex: card {card} of {instance_type} takes {limits[card]} interfaces."
            )
    twice = [slot for slot, count in Counter(slots).items() if count > 1]
    if twice:
        raise LaunchRefused(f"Each network interface requires a unique device index; card and index {twice[0]} is given twice.")
    if interfaces and (0, 0) not in slots:
        raise LaunchRefused("The primary network interface (network card 0, device index 0) is missing.")
    _check_efa(data, network)


def _check_efa(data: dict[str, Any], network: dict[str, Any]) -> None:
    efa = [interface for interface in data.get("NetworkInterfaces", []) if interface.get("InterfaceType", "").startswith("efa")]
    if not efa:
        return
    if not network.get("EfaSupported"):
        raise LaunchRefused(f"EFA interfaces are not supported on {data['InstanceType']}.")
    limit = network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 1)
    if len(efa) > limit:
        raise LaunchRefused(f"{len(efa)} EFA interfaces were requested; {data['InstanceType']} takes {limit}.")
    for interface in efa:
        if interface["InterfaceType"] == "efa-only" and not interface.get("NetworkCardIndex") and not interface["DeviceIndex"]:
            raise LaunchRefused("An EFA-only interface cannot be the primary network interface.")


def _check_groups(backend: Any, data: dict[str, Any], subnet: Any) -> None:
    named = [*data.get("SecurityGroupIds", [])]
    for interface in data.get("NetworkInterfaces", []):
        named += interface.get("Groups", [])
    for group_id in named:
        group = backend.get_security_group_from_id(group_id)
        if group is None:
            raise LaunchRefused(f"The security group '{group_id}' does not exist.")
        if group.vpc_id != subnet.vpc_id:
            raise LaunchRefused(f"Security group {group_id} and subnet {subnet.id} belong to different networks.")


def _check_placement(backend: Any, data: dict[str, Any], placement_group: str | None) -> None:
    for name in (data.get("Placement", {}).get("GroupName"), placement_group):
        if name and name not in placement_groups(backend):
            raise LaunchRefused(f"The Placement Group '{name}' is unknown.")


def _check_profile(backend: Any, data: dict[str, Any]) -> None:
    profile = data.get("IamInstanceProfile", {})
    known = iam_backends[backend.account_id][get_partition(backend.region_name)].instance_profiles.values()
    if profile.get("Name") and profile["Name"] not in [one.name for one in known]:
        raise LaunchRefused(f"Value ({profile['Name']}) for parameter iamInstanceProfile.name is invalid.")
    if profile.get("Arn") and profile["Arn"] not in [one.arn for one in known]:
        raise LaunchRefused(f"Value ({profile['Arn']}) for parameter iamInstanceProfile.arn is invalid.")
