"""Buckets that keep what is in them."""

from __future__ import annotations

import aws_cdk as cdk
import pytest
from aws_cdk import aws_kms as kms
from aws_cdk.assertions import Annotations, Match, Template

from traincluster import CheckpointBucket, DatasetBucket


def bucket_in(stack: cdk.Stack) -> dict:
    (bucket,) = Template.from_stack(stack).find_resources("AWS::S3::Bucket").values()
    return bucket


@pytest.mark.parametrize("kind", [CheckpointBucket, DatasetBucket])
def test_buckets_are_versioned_private_encrypted_and_kept(kind, stack):
    kind(stack, "Bucket")
    bucket = bucket_in(stack)
    properties = bucket["Properties"]
    assert bucket["DeletionPolicy"] == bucket["UpdateReplacePolicy"] == "Retain"
    assert properties["VersioningConfiguration"] == {"Status": "Enabled"}
    assert set(properties["PublicAccessBlockConfiguration"].values()) == {True}
    assert properties["BucketEncryption"]["ServerSideEncryptionConfiguration"][0]["ServerSideEncryptionByDefault"] == {
        "SSEAlgorithm": "AES256"
    }
    assert "BucketName" not in properties
    (policy,) = Template.from_stack(stack).find_resources("AWS::S3::BucketPolicy").values()
    assert policy["DeletionPolicy"] == "Retain"
    (statement,) = policy["Properties"]["PolicyDocument"]["Statement"]
    assert statement["Effect"] == "Deny"
    assert statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}


def test_a_key_of_ones_own_encrypts(stack):
    CheckpointBucket(stack, "Bucket", encryption_key=kms.Key(stack, "Key"))
    (rule,) = bucket_in(stack)["Properties"]["BucketEncryption"]["ServerSideEncryptionConfiguration"]
    assert rule["ServerSideEncryptionByDefault"]["SSEAlgorithm"] == "aws:kms"
    assert rule["BucketKeyEnabled"] is True


@pytest.mark.parametrize("kind", [CheckpointBucket, DatasetBucket])
def test_sto_08_lifecycle_cleans_up_and_expires_nothing_current(kind, stack):
    kind(stack, "Bucket")
    (rule,) = bucket_in(stack)["Properties"]["LifecycleConfiguration"]["Rules"]
    assert rule["Status"] == "Enabled"
    assert rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"] <= 7
    assert rule["NoncurrentVersionExpiration"] == {"NoncurrentDays": 7}
    assert "ExpirationInDays" not in rule and "ExpirationDate" not in rule


def test_checkpoints_move_to_infrequent_access_but_stay_readable(stack):
    CheckpointBucket(stack, "Bucket")
    (rule,) = bucket_in(stack)["Properties"]["LifecycleConfiguration"]["Rules"]
    assert rule["Transitions"] == [{"StorageClass": "STANDARD_IA", "TransitionInDays": 30}]
    Annotations.from_stack(stack).has_no_warning("*", Match.any_value())


def test_archive_is_asked_for_and_warned_of(stack):
    CheckpointBucket(stack, "Bucket", glacier_days=90)
    (rule,) = bucket_in(stack)["Properties"]["LifecycleConfiguration"]["Rules"]
    assert {"StorageClass": "GLACIER", "TransitionInDays": 90} in rule["Transitions"]
    Annotations.from_stack(stack).has_warning("*", Match.string_like_regexp("paused for longer cannot resume"))


def test_transitions_can_be_left_out(stack):
    CheckpointBucket(stack, "Bucket", infrequent_access_days=None)
    (rule,) = bucket_in(stack)["Properties"]["LifecycleConfiguration"]["Rules"]
    assert "Transitions" not in rule


@pytest.mark.parametrize(
    ("days", "message"),
    [
        ({"infrequent_access_days": 7}, "infrequent_access_days is 7. Allowed: 30 or more"),
        ({"glacier_days": 59}, "glacier_days is 59. Allowed here: 60 or more"),
        ({"infrequent_access_days": None, "glacier_days": 0}, "glacier_days is 0. Allowed here: 1 or more"),
    ],
)
def test_days_that_s3_does_not_take_are_refused(days, message, stack):
    with pytest.raises(ValueError, match=message):
        CheckpointBucket(stack, "Bucket", **days)
