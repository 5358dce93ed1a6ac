"""What can go wrong with identities: keys, partitions and regions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from traincluster.rules.engine import rule
from traincluster.rules.finding import Finding

_PARTITIONS = {"cn-": "aws-cn", "us-gov-": "aws-us-gov", "us-iso-": "aws-iso", "us-isob-": "aws-iso-b"}


@dataclass(frozen=True, kw_only=True)
class IdentityFacts:
    """Who a cluster's parts belong to."""

    region: str | None
    arns: tuple[tuple[str, str], ...]
    """Each ARN that the user gave, with the setting that it was given as."""
    volume_key_is_foreign: bool
    """Whether volumes are encrypted by a key whose policy this app cannot change."""


def partition_of(region: str) -> str:
    """The partition of a region."""
    return next((partition for prefix, partition in _PARTITIONS.items() if region.startswith(prefix)), "aws")


@rule(
    "arn-is-of-partition",
    summary="Every ARN belongs to the partition (AWS, GovCloud, China) of the stack's region.",
    source="docs.aws.amazon.com/IAM/latest/UserGuide/reference-arns.html",
)
def arn_is_of_partition(facts: IdentityFacts) -> Iterator[Finding]:
    if facts.region is None:
        return
    wanted = partition_of(facts.region)
    for what, arn in facts.arns:
        found = arn.split(":")[1]
        if found != wanted:
            yield Finding(
                "error",
                "arn-is-of-partition",
                f"{what} is {arn!r}, of the partition {found!r}, but the stack is deployed to {facts.region}, of {wanted!r}.",
                f"Give one whose ARN begins with 'arn:{wanted}:'.",
            )


@rule(
    "arn-is-of-region",
    summary="Every ARN with a region belongs to the stack's.",
    source="docs.aws.amazon.com/IAM/latest/UserGuide/reference-arns.html",
)
def arn_is_of_region(facts: IdentityFacts) -> Iterator[Finding]:
    for what, arn in facts.arns:
        found = arn.split(":")[3]
        if facts.region is not None and found not in ("", facts.region):
            yield Finding(
                "error",
                "arn-is-of-region",
                f"{what} is {arn!r}, in {found}, but the stack is deployed to {facts.region}.",
                f"Give one in {facts.region}.",
            )


@rule(
    "volume-key-admits-auto-scaling",
    summary="The key of encrypted volumes admits the service-linked role of Auto Scaling.",
    source="docs.aws.amazon.com/autoscaling/ec2/userguide/key-policy-requirements-EBS-encryption.html",
    levels=("warning",),
)
def volume_key_admits_auto_scaling(facts: IdentityFacts) -> Iterator[Finding]:
    if facts.volume_key_is_foreign:
        yield Finding(
            "warning",
            "volume-key-admits-auto-scaling",
            "The nodes' volumes are encrypted by a key that is not made in this app, so its policy stays as it is: unless it "
            "lets the role AWSServiceRoleForAutoScaling use the key and create grants, each node ends as soon as it is launched.",
            "Add both statements to the key's policy, or give the account's key for EBS by leaving volume_key out.",
        )
