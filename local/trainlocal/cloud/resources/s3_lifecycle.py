"""Lifecycle rules of buckets, which CloudFormation and S3 write differently."""

from __future__ import annotations

from typing import Any

from trainlocal.cloud.resources.schema import FLAG, TEXT, WHOLE, Many, record

_TRANSITION = record(StorageClass=TEXT, TransitionDate=TEXT, TransitionInDays=WHOLE, required="StorageClass")
_NONCURRENT = record(
    NewerNoncurrentVersions=WHOLE, StorageClass=TEXT, TransitionInDays=WHOLE, required="StorageClass TransitionInDays"
)
_RULE = record(
    AbortIncompleteMultipartUpload=record(DaysAfterInitiation=WHOLE, required="DaysAfterInitiation"),
    ExpirationDate=TEXT,
    ExpirationInDays=WHOLE,
    ExpiredObjectDeleteMarker=FLAG,
    Id=TEXT,
    NoncurrentVersionExpiration=record(NewerNoncurrentVersions=WHOLE, NoncurrentDays=WHOLE, required="NoncurrentDays"),
    NoncurrentVersionTransitions=Many(_NONCURRENT),
    Prefix=TEXT,
    Status=TEXT,
    TagFilters=Many(record(Key=TEXT, Value=TEXT, required="Key Value")),
    Transitions=Many(_TRANSITION),
    required="Status",
)
LIFECYCLE = record(Rules=Many(_RULE), required="Rules")


def lifecycle_rules(configuration: dict[str, Any]) -> list[dict[str, Any]]:
    """The rules as S3 takes them."""
    return [_rule(index, rule) for index, rule in enumerate(configuration["Rules"])]


def _rule(index: int, rule: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"ID": rule.get("Id", f"rule-{index}"), "Status": rule["Status"], "Filter": _filter(rule)}
    for name in ("AbortIncompleteMultipartUpload", "NoncurrentVersionExpiration"):
        if name in rule:
            made[name] = rule[name]
    expiration = {
        there: rule[here]
        for here, there in (
            ("ExpirationInDays", "Days"),
            ("ExpirationDate", "Date"),
            ("ExpiredObjectDeleteMarker", "ExpiredObjectDeleteMarker"),
        )
        if here in rule
    }
    if expiration:
        made["Expiration"] = expiration
    if "Transitions" in rule:
        made["Transitions"] = [_renamed(each, TransitionInDays="Days", TransitionDate="Date") for each in rule["Transitions"]]
    if "NoncurrentVersionTransitions" in rule:
        made["NoncurrentVersionTransitions"] = [
            _renamed(each, TransitionInDays="NoncurrentDays") for each in rule["NoncurrentVersionTransitions"]
        ]
    return made


def _filter(rule: dict[str, Any]) -> dict[str, Any]:
    tags, prefix = rule.get("TagFilters", []), rule.get("Prefix", "")
    if not tags:
        return {"Prefix": prefix}
    if len(tags) == 1 and not prefix:
        return {"Tag": tags[0]}
    return {"And": {"Prefix": prefix, "Tags": tags}}


def _renamed(value: dict[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(key, key): each for key, each in value.items()}
