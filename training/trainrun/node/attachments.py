"""The EBS volumes of this instance, asked of EC2."""

from __future__ import annotations

import boto3
from botocore.config import Config


def attached_volumes(*, node: str, region: str) -> dict[str, str]:
    """Volume ids by the device names under which EC2 has attached them, such as "/dev/sdf".

    Raises:
        botocore.exceptions.BotoCoreError, ClientError: the request failed after botocore's own retries.
    """
    config = Config(connect_timeout=3, read_timeout=10, retries={"mode": "standard", "total_max_attempts": 4})
    client = boto3.session.Session().client("ec2", region_name=region, config=config)
    (reservation,) = client.describe_instances(InstanceIds=[node])["Reservations"]
    mappings = reservation["Instances"][0].get("BlockDeviceMappings", [])
    return {mapping["DeviceName"]: mapping["Ebs"]["VolumeId"] for mapping in mappings if "Ebs" in mapping}
