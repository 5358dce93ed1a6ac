"""How an Auto Scaling group launches an instance from its launch template, with the checks that EC2 makes.

moto passes on the image, type, user data and tags only. Here the whole template counts: network interfaces with their cards,
placement group, instance profile, metadata options, volumes, market. What EC2 would refuse becomes a failed scaling activity
with EC2's words.
"""

from __future__ import annotations

from typing import Any

from moto.autoscaling.models import FakeAutoScalingGroup, InstanceState
from moto.core.exceptions import ServiceException
from moto.core.types import Base64EncodedString
from moto.ec2.models.elastic_network_interfaces import Attachment
from moto.ec2.models.instances import Instance
from moto.ec2.utils import convert_tag_spec, parse_user_data

from trainlocal.cloud.services.activities import record_activity
from trainlocal.cloud.services.amending import amend
from trainlocal.cloud.services.launch_checks import LaunchRefused, check_launch

_launch_from_configuration = FakeAutoScalingGroup.replace_autoscaling_group_instances
_attach = Attachment.__init__


def install() -> None:
    """Makes Auto Scaling groups launch from the whole of their launch template."""
    amend(FakeAutoScalingGroup, "replace_autoscaling_group_instances", launch)
    amend(Attachment, "__init__", _attach_to_card)


def _attach_to_card(attachment: Attachment, interface: Any) -> None:
    _attach(attachment, interface)
    attachment.network_card_index = interface.__dict__.get("network_card_index", 0)


def launch(group: FakeAutoScalingGroup, count: int, tags: dict[str, str]) -> None:
    """Launches ``count`` instances into the group, recording each as an activity; stops at the first that is refused."""
    if group.ec2_launch_template is None:
        _launch_from_configuration(group, count, tags)
        return
    for _ in range(count):
        try:
            instance: Any = launch_instance(group, tags)
        except (LaunchRefused, ServiceException) as refusal:
            message = f"{refusal.message} Launching EC2 instance failed."
            record_activity(group, "Launching a new EC2 instance.  Status Reason: " + message, status="Failed", message=message)
            return
        instance.autoscaling_group = group
        group.instance_states.append(InstanceState(instance, protected_from_scale_in=group.new_instances_protected_from_scale_in))
        record_activity(group, f"Launching a new EC2 instance: {instance.id}")


def launch_instance(group: Any, tags: dict[str, str]) -> Instance:
    """One instance of the group's launch template; raises ``LaunchRefused`` as EC2 would."""
    backend = group.ec2_backend
    version = group.ec2_launch_template.get_version(group.launch_template_version)
    data = dict(version.data)
    data.setdefault("InstanceType", _first_override(group))
    subnet = _subnet(group)
    user_data = _user_data(data)
    check_launch(backend, data, subnet=subnet, user_data=user_data, placement_group=group.placement_group)

    interfaces = data.get("NetworkInterfaces", [])
    primary = [interface for interface in interfaces if _slot(interface) == (0, 0)]
    groups = data.get("SecurityGroupIds", []) + data.get("SecurityGroups", [])
    volumes = _volumes(backend, data)
    instance: Instance = backend.run_instances(
        data["ImageId"],
        1,
        user_data,
        [],
        instance_type=data["InstanceType"],
        is_instance_type_default=False,
        region_name=backend.region_name,
        subnet_id=subnet.id,
        private_ip=fresh_address(subnet),
        security_group_ids=groups,
        nics=[{"DeleteOnTermination": True, **interface} for interface in primary]
        or [{"DeviceIndex": 0, "DeleteOnTermination": True, "SubnetId": subnet.id}],
        tags={"instance": {**_group_tags(group, version), **tags}, "volume": _tags(data, "volume")},
        ebs_optimized=data.get("EbsOptimized", False),
        monitoring_state="enabled" if data.get("Monitoring", {}).get("Enabled") else "disabled",
        metadata_options=data.get("MetadataOptions", {}),
        key_name=data.get("KeyName"),
        block_device_mappings=[{**volume, "Ebs": {**volume["Ebs"], "VolumeType": "gp3"}} for volume in volumes],
        instance_initiated_shutdown_behavior=data.get("InstanceInitiatedShutdownBehavior"),
    ).instances[0]
    for volume in volumes:
        _set_performance(backend, instance, volume["DeviceName"], volume["Ebs"])
    instance.security_groups = list(instance.nics[0]._group_set)
    for interface in interfaces:
        if _slot(interface) != (0, 0):
            _add_interface(backend, instance, subnet, interface)
    instance.placement.group_name = data.get("Placement", {}).get("GroupName") or group.placement_group or ""
    instance.placement.tenancy = data.get("Placement", {}).get("Tenancy", "default")
    instance.lifecycle = data.get("InstanceMarketOptions", {}).get("MarketType")
    profile = data.get("IamInstanceProfile", {})
    if profile:
        backend.associate_iam_instance_profile(
            instance_id=instance.id, iam_instance_profile_name=profile.get("Name"), iam_instance_profile_arn=profile.get("Arn")
        )
    return instance


def fresh_address(subnet: Any) -> str:
    """The next address of the subnet that no instance ever had; when there is none left, one that was given back.

    moto hands a terminated instance's address to its replacement at once, which AWS hardly ever does, and which would let
    peers take the one for the other.
    """
    for candidate in subnet._subnet_ip_generator:
        if str(candidate) not in subnet._subnet_ips and candidate != subnet.cidr.broadcast_address:
            return str(candidate)
    address: str = subnet._unused_ips.pop()
    return address


def _first_override(group: FakeAutoScalingGroup) -> str | None:
    template = (group.mixed_instances_policy or {}).get("LaunchTemplate", {})
    instance_type: str | None = next((override.get("InstanceType") for override in template.get("Overrides", [])), None)
    return instance_type


def _subnet(group: FakeAutoScalingGroup) -> Any:
    """The subnet of the group with the fewest of its instances, as Auto Scaling balances them."""
    if not group.vpc_zone_identifier:
        raise LaunchRefused("The group has no VPCZoneIdentifier; a group without subnets is not emulated.")
    ids = [subnet_id.strip() for subnet_id in group.vpc_zone_identifier.split(",")]
    occupied = [state.instance.subnet_id for state in group.instance_states]
    return group.ec2_backend.get_subnet(min(ids, key=occupied.count))


def _user_data(data: dict[str, Any]) -> Base64EncodedString | None:
    user_data = data.get("UserData")
    return user_data if isinstance(user_data, Base64EncodedString) else parse_user_data(user_data)


def _tags(data: dict[str, Any], kind: str) -> dict[str, str]:
    tags: dict[str, str] = convert_tag_spec(data.get("TagSpecifications", [])).get(kind, {})
    return tags


def _group_tags(group: FakeAutoScalingGroup, version: Any) -> dict[str, str]:
    return {
        **_tags(version.data, "instance"),
        "aws:ec2launchtemplate:id": version.template.id,
        "aws:ec2launchtemplate:version": str(version.number),
        "aws:autoscaling:groupName": group.name,
    }


def _slot(interface: dict[str, Any]) -> tuple[int, int]:
    """Network card and device index of an interface."""
    return int(interface.get("NetworkCardIndex") or 0), int(interface.get("DeviceIndex") or 0)


def _add_interface(backend: Any, instance: Instance, subnet: Any, interface: dict[str, Any]) -> None:
    """Makes a further interface and attaches it, several with the same device index on different cards included."""
    card, device = _slot(interface)
    made = backend.create_network_interface(
        subnet,
        fresh_address(subnet),
        group_ids=interface.get("Groups"),
        description=interface.get("Description"),
        delete_on_termination=bool(interface.get("DeleteOnTermination", False)),
    )
    made.interface_type = interface.get("InterfaceType", "interface")
    if made.interface_type == "efa-only":
        made.private_ip_address, made.private_ip_addresses = None, []  # such an interface speaks no IP
    else:
        subnet.request_ip(made.private_ip_address, instance=made)
    instance.attach_eni(made, device + 1000 * card)  # moto keys by device index, which only a card makes unique
    made.device_index = device
    made.network_card_index = card


def _volumes(backend: Any, data: dict[str, Any]) -> list[dict[str, Any]]:
    """The block devices of the image as the template changes them, those backed by EBS."""
    image = backend.describe_images(ami_ids=[data["ImageId"]])[0]
    devices = {image.root_device_name: {"VolumeSize": 8, "VolumeType": "gp3", "DeleteOnTermination": True}}
    for mapping in data.get("BlockDeviceMappings", []):
        name = mapping["DeviceName"]
        if mapping.get("NoDevice") is not None:
            devices.pop(name, None)
        elif "Ebs" in mapping:
            devices[name] = {**devices.get(name, {"VolumeSize": 8}), **mapping["Ebs"]}
            if devices[name].get("VolumeType") in ("io1", "io2") and "Iops" not in devices[name]:
                raise LaunchRefused(f"The parameter iops must be specified for {devices[name]['VolumeType']} volumes.")
    return [{"DeviceName": name, "Ebs": volume} for name, volume in devices.items()]


def _set_performance(backend: Any, instance: Instance, device: str, asked: dict[str, Any]) -> None:
    """Give a volume its type and performance, which moto does not hand on to the volumes of an instance."""
    volume = backend.get_volume(instance.block_device_mapping[device].volume_id)
    volume.volume_type = asked.get("VolumeType", volume.volume_type)
    volume.iops = int(asked["Iops"]) if "Iops" in asked else volume.iops
    volume.throughput = int(asked["Throughput"]) if "Throughput" in asked else volume.throughput
