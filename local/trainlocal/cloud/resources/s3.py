"""Buckets and their policies."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from trainlocal.cloud.resources.provider import Place, Provider, provides, undone_on_error
from trainlocal.cloud.resources.s3_lifecycle import LIFECYCLE, lifecycle_rules
from trainlocal.cloud.resources.schema import DOCUMENT, FLAG, TAGS, TEXT, Many, record

_CANNED = {
    "AuthenticatedRead": "authenticated-read",
    "BucketOwnerFullControl": "bucket-owner-full-control",
    "BucketOwnerRead": "bucket-owner-read",
    "LogDeliveryWrite": "log-delivery-write",
    "Private": "private",
    "PublicRead": "public-read",
    "PublicReadWrite": "public-read-write",
}
_ENCRYPTION = record(
    BucketKeyEnabled=FLAG, ServerSideEncryptionByDefault=record(KMSMasterKeyID=TEXT, SSEAlgorithm=TEXT, required="SSEAlgorithm")
)
_BLOCK = record(BlockPublicAcls=FLAG, BlockPublicPolicy=FLAG, IgnorePublicAcls=FLAG, RestrictPublicBuckets=FLAG)


@provides
class Bucket(Provider):
    """A bucket."""

    type = "AWS::S3::Bucket"
    schema = record(
        AccessControl=TEXT,
        BucketEncryption=record(ServerSideEncryptionConfiguration=Many(_ENCRYPTION)),
        BucketName=TEXT,
        LifecycleConfiguration=LIFECYCLE,
        OwnershipControls=record(Rules=Many(record(ObjectOwnership=TEXT))),
        PublicAccessBlockConfiguration=_BLOCK,
        Tags=TAGS,
        VersioningConfiguration=record(Status=TEXT, required="Status"),
    )
    replacing = frozenset({"BucketName"})
    attributes = frozenset({"Arn", "DomainName", "DualStackDomainName", "RegionalDomainName"})
    name_property = "BucketName"

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        client = place.client("s3")
        name: str = properties.get("BucketName") or place.name(limit=63, lower=True)
        where = {} if place.region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": place.region}}
        if name in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
            raise ValueError(f"{name} already exists")  # us-east-1 answers a second creation by the owner with success
        client.create_bucket(Bucket=name, **where)
        with undone_on_error(lambda: client.delete_bucket(Bucket=name)):
            self.update(place, name, properties, {})
        return name

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        for name, put, delete in _settings(place.client("s3"), physical_id):
            if name in properties and properties[name] != before.get(name):
                put(properties[name])
            elif name in before and name not in properties:
                delete()
        client = place.client("s3")
        tags = [{"Key": key, "Value": value} for key, value in place.tags(properties).items()]
        if tags:
            client.put_bucket_tagging(Bucket=physical_id, Tagging={"TagSet": tags})
        else:
            client.delete_bucket_tagging(Bucket=physical_id)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("s3").delete_bucket(Bucket=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return {
            "Arn": f"arn:{place.partition}:s3:::{physical_id}",
            "DomainName": f"{physical_id}.s3.amazonaws.com",
            "DualStackDomainName": f"{physical_id}.s3.dualstack.{place.region}.amazonaws.com",
            "RegionalDomainName": f"{physical_id}.s3.{place.region}.amazonaws.com",
        }[name]


def _settings(client: Any, bucket: str) -> list[tuple[str, Callable[[Any], Any], Callable[[], Any]]]:
    """Each setting of a bucket: the property, how it is set, how it goes back to what a new bucket has."""

    def put_versioning(status: str) -> None:
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": status})

    def put_encryption(value: dict[str, Any]) -> None:
        rules = [
            {
                "ApplyServerSideEncryptionByDefault": rule["ServerSideEncryptionByDefault"],
                "BucketKeyEnabled": rule.get("BucketKeyEnabled", False),
            }
            for rule in value["ServerSideEncryptionConfiguration"]
        ]
        client.put_bucket_encryption(Bucket=bucket, ServerSideEncryptionConfiguration={"Rules": rules})

    return [
        (
            "VersioningConfiguration",
            lambda value: put_versioning(value["Status"]),
            lambda: put_versioning("Suspended"),
        ),
        ("BucketEncryption", put_encryption, lambda: client.delete_bucket_encryption(Bucket=bucket)),
        (
            "LifecycleConfiguration",
            lambda value: client.put_bucket_lifecycle_configuration(
                Bucket=bucket, LifecycleConfiguration={"Rules": lifecycle_rules(value)}
            ),
            lambda: client.delete_bucket_lifecycle(Bucket=bucket),
        ),
        (
            "OwnershipControls",
            lambda value: client.put_bucket_ownership_controls(Bucket=bucket, OwnershipControls=value),
            lambda: client.delete_bucket_ownership_controls(Bucket=bucket),
        ),
        (
            "PublicAccessBlockConfiguration",
            lambda value: client.put_public_access_block(Bucket=bucket, PublicAccessBlockConfiguration=value),
            lambda: client.delete_public_access_block(Bucket=bucket),
        ),
        (
            "AccessControl",
            lambda value: client.put_bucket_acl(Bucket=bucket, ACL=_CANNED[value]),
            lambda: client.put_bucket_acl(Bucket=bucket, ACL="private"),
        ),
    ]


@provides
class BucketPolicy(Provider):
    """The policy of a bucket."""

    type = "AWS::S3::BucketPolicy"
    schema = record(Bucket=TEXT, PolicyDocument=DOCUMENT, required="Bucket PolicyDocument")
    replacing = frozenset({"Bucket"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        self.update(place, "", properties, {})
        bucket: str = properties["Bucket"]
        return bucket

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        place.client("s3").put_bucket_policy(Bucket=properties["Bucket"], Policy=json.dumps(properties["PolicyDocument"]))

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("s3").delete_bucket_policy(Bucket=properties["Bucket"])
