"""EFS: file systems, mount targets and access points."""

from __future__ import annotations

import uuid
from typing import Any

from trainlocal.cloud.resources.provider import Place, Provider, provides
from trainlocal.cloud.resources.schema import FLAG, NUMBER, TAGS, TEXT, TEXTS, WHOLE, Many, record


def _tags(place: Place, properties: dict[str, Any], name: str) -> list[dict[str, str]]:
    tags = place.tags({"Tags": properties.get(name, [])})
    return [{"Key": key, "Value": value} for key, value in tags.items()]


@provides
class FileSystem(Provider):
    """A file system."""

    type = "AWS::EFS::FileSystem"
    schema = record(
        AvailabilityZoneName=TEXT,
        Encrypted=FLAG,
        FileSystemTags=TAGS,
        KmsKeyId=TEXT,
        LifecyclePolicies=Many(record(TransitionToArchive=TEXT, TransitionToIA=TEXT, TransitionToPrimaryStorageClass=TEXT)),
        PerformanceMode=TEXT,
        ProvisionedThroughputInMibps=NUMBER,
        ThroughputMode=TEXT,
    )
    replacing = frozenset({"AvailabilityZoneName", "Encrypted", "KmsKeyId", "PerformanceMode"})
    attributes = frozenset({"Arn", "FileSystemId"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        apart = ("FileSystemTags", "LifecyclePolicies")
        request = {name: value for name, value in properties.items() if name not in apart}
        tags = _tags(place, properties, "FileSystemTags")
        client = place.client("efs")
        made: str = client.create_file_system(CreationToken=uuid.uuid4().hex, Tags=tags, **request)["FileSystemId"]
        if "LifecyclePolicies" in properties:
            client.put_lifecycle_configuration(FileSystemId=made, LifecyclePolicies=properties["LifecyclePolicies"])
        return made

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("efs").delete_file_system(FileSystemId=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return physical_id if name == "FileSystemId" else place.arn("elasticfilesystem", f"file-system/{physical_id}")


@provides
class MountTarget(Provider):
    """The address of a file system in a subnet."""

    type = "AWS::EFS::MountTarget"
    schema = record(
        FileSystemId=TEXT, IpAddress=TEXT, SecurityGroups=TEXTS, SubnetId=TEXT, required="FileSystemId SecurityGroups SubnetId"
    )
    replacing = frozenset({"FileSystemId", "IpAddress", "SubnetId"})
    attributes = frozenset({"Id", "IpAddress"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        made: str = place.client("efs").create_mount_target(**properties)["MountTargetId"]
        return made

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        groups = properties["SecurityGroups"]
        place.client("efs").modify_mount_target_security_groups(MountTargetId=physical_id, SecurityGroups=groups)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("efs").delete_mount_target(MountTargetId=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        if name == "Id":
            return physical_id
        return place.client("efs").describe_mount_targets(MountTargetId=physical_id)["MountTargets"][0]["IpAddress"]


@provides
class AccessPoint(Provider):
    """A folder of a file system with an owner of its own."""

    type = "AWS::EFS::AccessPoint"
    schema = record(
        AccessPointTags=TAGS,
        ClientToken=TEXT,
        FileSystemId=TEXT,
        PosixUser=record(Gid=WHOLE, SecondaryGids=Many(WHOLE), Uid=WHOLE, required="Gid Uid"),
        RootDirectory=record(CreationInfo=record(OwnerGid=WHOLE, OwnerUid=WHOLE, Permissions=TEXT), Path=TEXT),
        required="FileSystemId",
    )
    replacing = frozenset({"ClientToken", "FileSystemId", "PosixUser", "RootDirectory"})
    attributes = frozenset({"AccessPointId", "Arn"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        request = {name: value for name, value in properties.items() if name != "AccessPointTags"}
        request.setdefault("ClientToken", uuid.uuid4().hex)
        tags = _tags(place, properties, "AccessPointTags")
        made: str = place.client("efs").create_access_point(Tags=tags, **request)["AccessPointId"]
        return made

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("efs").delete_access_point(AccessPointId=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return physical_id if name == "AccessPointId" else place.arn("elasticfilesystem", f"access-point/{physical_id}")
