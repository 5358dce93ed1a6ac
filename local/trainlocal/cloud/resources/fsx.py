"""FSx for Lustre: file systems and their links with S3."""

from __future__ import annotations

from typing import Any

from trainlocal.cloud.resources.provider import Place, Provider, provides
from trainlocal.cloud.resources.schema import FLAG, TAGS, TEXT, TEXTS, WHOLE, record

_LUSTRE = record(
    AutomaticBackupRetentionDays=WHOLE,
    DataCompressionType=TEXT,
    DataReadCacheConfiguration=record(SizeGiB=WHOLE, SizingMode=TEXT),
    DeploymentType=TEXT,
    DriveCacheType=TEXT,
    EfaEnabled=FLAG,
    MetadataConfiguration=record(Iops=WHOLE, Mode=TEXT),
    PerUnitStorageThroughput=WHOLE,
    ThroughputCapacity=WHOLE,
    WeeklyMaintenanceStartTime=TEXT,
)
_CREATE_ONLY = ("DeploymentType", "DriveCacheType", "EfaEnabled")


def _request(place: Place, properties: dict[str, Any]) -> dict[str, Any]:
    """The properties as the API takes them: with the stack's tags, or without any."""
    tags = [{"Key": key, "Value": value} for key, value in place.tags(properties).items()]
    request = {name: value for name, value in properties.items() if name != "Tags"}
    return {**request, "Tags": tags} if tags else request


@provides
class FileSystem(Provider):
    """A file system; of the types that FSx has, Lustre alone."""

    type = "AWS::FSx::FileSystem"
    schema = record(
        FileSystemType=TEXT,
        FileSystemTypeVersion=TEXT,
        KmsKeyId=TEXT,
        LustreConfiguration=_LUSTRE,
        SecurityGroupIds=TEXTS,
        StorageCapacity=WHOLE,
        StorageType=TEXT,
        SubnetIds=TEXTS,
        Tags=TAGS,
        required="FileSystemType SubnetIds",
    )
    replacing = frozenset({"FileSystemType", "KmsKeyId", "SecurityGroupIds", "StorageType", "SubnetIds"})
    attributes = frozenset({"DNSName", "LustreMountName", "ResourceARN"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        if properties["FileSystemType"] != "LUSTRE":
            raise ValueError(f"FileSystemType {properties['FileSystemType']} is not emulated")
        answer = place.client("fsx").create_file_system(**_request(place, properties))
        made: str = answer["FileSystem"]["FileSystemId"]
        return made

    def needs_replacement(self, before: Any, after: Any) -> bool:
        was, now = before.get("LustreConfiguration", {}), after.get("LustreConfiguration", {})
        return super().needs_replacement(before, after) or any(was.get(name) != now.get(name) for name in _CREATE_ONLY)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("fsx").delete_file_system(FileSystemId=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        (found,) = place.client("fsx").describe_file_systems(FileSystemIds=[physical_id])["FileSystems"]
        if name == "LustreMountName":
            return found["LustreConfiguration"]["MountName"]
        return found[name]


@provides
class DataRepositoryAssociation(Provider):
    """A link between a folder of a file system and a bucket."""

    type = "AWS::FSx::DataRepositoryAssociation"
    schema = record(
        BatchImportMetaDataOnCreate=FLAG,
        DataRepositoryPath=TEXT,
        FileSystemId=TEXT,
        FileSystemPath=TEXT,
        ImportedFileChunkSize=WHOLE,
        S3=record(AutoExportPolicy=record(Events=TEXTS), AutoImportPolicy=record(Events=TEXTS)),
        Tags=TAGS,
        required="DataRepositoryPath FileSystemId FileSystemPath",
    )
    replacing = frozenset({"BatchImportMetaDataOnCreate", "DataRepositoryPath", "FileSystemId", "FileSystemPath"})
    attributes = frozenset({"AssociationId", "ResourceARN"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        answer = place.client("fsx").create_data_repository_association(**_request(place, properties))
        made: str = answer["Association"]["AssociationId"]
        return made

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("fsx").delete_data_repository_association(AssociationId=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        answer = place.client("fsx").describe_data_repository_associations(AssociationIds=[physical_id])
        return answer["Associations"][0][name]
