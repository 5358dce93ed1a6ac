"""The instances of the emulated account, as the fleet sees them through the AWS API."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from trainlocal.fleet.dns import node_name

GROUP_TAG = "aws:autoscaling:groupName"


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One EC2 instance: what a node has to know of itself."""

    id: str
    address: str
    type: str
    image: str
    region: str
    zone: str
    account: str
    mac: str
    subnet: str
    vpc: str
    vpc_cidr: str
    launched: datetime
    launch_index: int = 0
    architecture: str = "x86_64"
    life_cycle: str = "on-demand"
    role: str = ""
    user_data: bytes = b""
    security_groups: tuple[str, ...] = ()
    tags: dict[str, str] = field(default_factory=dict)
    volumes: tuple[str, ...] = ()
    """Ids of its EBS volumes, that of the root volume first."""

    @property
    def hostname(self) -> str:
        """The private DNS name, which EC2 makes the host name too."""
        return node_name(self.address, self.region)

    @property
    def prefix(self) -> int:
        """The length of the VPC's prefix: nodes of one VPC reach each other directly."""
        return int(self.vpc_cidr.partition("/")[2])


class Account:
    """The calls that the fleet makes. `region` names the one region it looks after."""

    def __init__(self, region: str) -> None:
        import boto3  # slow to load; a process that only wants `Instance` goes without
        from botocore.config import Config

        config = Config(connect_timeout=5, read_timeout=20, retries={"mode": "standard", "max_attempts": 3})
        self._region = region
        self._ec2 = boto3.client("ec2", region_name=region, config=config)
        self._iam = boto3.client("iam", region_name=region, config=config)
        self._scaling = boto3.client("autoscaling", region_name=region, config=config)

    def live(self) -> dict[str, dict[str, Any]]:
        """The pending and running instances of all Auto Scaling groups, by id."""
        pages = self._ec2.get_paginator("describe_instances").paginate(
            Filters=[
                {"Name": "tag-key", "Values": [GROUP_TAG]},
                {"Name": "instance-state-name", "Values": ["pending", "running"]},
            ]
        )
        found: dict[str, dict[str, Any]] = {}
        for page in pages:
            for reservation in page["Reservations"]:
                for instance in reservation["Instances"]:
                    found[instance["InstanceId"]] = {**instance, "OwnerId": reservation["OwnerId"]}
        return found

    def leaving(self) -> set[str]:
        """The instances that their groups are about to end: they wait in a lifecycle hook."""
        pages = self._scaling.get_paginator("describe_auto_scaling_instances").paginate()
        members = [member for page in pages for member in page["AutoScalingInstances"]]
        return {member["InstanceId"] for member in members if member["LifecycleState"].startswith("Terminating")}

    def describe(self, raw: dict[str, Any]) -> Instance:
        """All that a node needs, from one entry of `live`."""
        vpc = self._ec2.describe_vpcs(VpcIds=[raw["VpcId"]])["Vpcs"][0]
        attribute = self._ec2.describe_instance_attribute(InstanceId=raw["InstanceId"], Attribute="userData")
        primary = raw["NetworkInterfaces"][0]
        return Instance(
            id=raw["InstanceId"],
            address=raw["PrivateIpAddress"],
            type=raw["InstanceType"],
            image=raw["ImageId"],
            region=self._region,
            zone=raw["Placement"]["AvailabilityZone"],
            account=raw["OwnerId"],
            mac=primary["MacAddress"],
            subnet=raw["SubnetId"],
            vpc=raw["VpcId"],
            vpc_cidr=vpc["CidrBlock"],
            launched=raw["LaunchTime"],
            launch_index=raw.get("AmiLaunchIndex", 0),
            architecture=raw.get("Architecture", "x86_64"),
            life_cycle=raw.get("InstanceLifecycle", "on-demand"),
            role=self._role(raw.get("IamInstanceProfile")),
            user_data=base64.b64decode(attribute.get("UserData", {}).get("Value", "")),
            security_groups=tuple(group["GroupName"] for group in raw.get("SecurityGroups", [])),
            tags={tag["Key"]: tag["Value"] for tag in raw.get("Tags", [])},
            volumes=_volumes(raw),
        )

    def _role(self, profile: dict[str, Any] | None) -> str:
        if not profile:
            return ""
        name = profile["Arn"].rpartition("/")[2]
        roles = self._iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Roles"]
        return str(roles[0]["RoleName"]) if roles else ""

    def terminate(self, instance_id: str) -> None:
        """Terminate an instance; its group then replaces it."""
        self._ec2.terminate_instances(InstanceIds=[instance_id])


def _volumes(raw: dict[str, Any]) -> tuple[str, ...]:
    mappings = [mapping for mapping in raw.get("BlockDeviceMappings", []) if "Ebs" in mapping]
    mappings.sort(key=lambda mapping: (mapping["DeviceName"] != raw.get("RootDeviceName"), mapping["DeviceName"]))
    return tuple(mapping["Ebs"]["VolumeId"] for mapping in mappings)
