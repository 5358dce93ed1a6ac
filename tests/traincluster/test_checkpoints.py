"""Buckets that keep what is in them."""

from __future__ import annotations

import aws_cdk as cdk
import pytest
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk.assertions import Annotations, Match, Template

from traincluster import CheckpointBucket, DatasetBucket
from traincluster.checkpoints import REMOVE_DATA


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


def test_checkpoints_grow_cheaper_with_age_and_it_is_told(stack):
    CheckpointBucket(stack, "Bucket")
    (rule,) = bucket_in(stack)["Properties"]["LifecycleConfiguration"]["Rules"]
    assert rule["Transitions"] == [
        {"StorageClass": "STANDARD_IA", "TransitionInDays": 30},
        {"StorageClass": "GLACIER", "TransitionInDays": 90},
    ]
    Annotations.from_stack(stack).has_info("*", Match.string_like_regexp("paused for longer cannot resume"))
    Annotations.from_stack(stack).has_no_warning("*", Match.any_value())


def test_checkpoints_stay_readable_when_asked(stack):
    CheckpointBucket(stack, "Bucket", glacier_days=None)
    (rule,) = bucket_in(stack)["Properties"]["LifecycleConfiguration"]["Rules"]
    assert rule["Transitions"] == [{"StorageClass": "STANDARD_IA", "TransitionInDays": 30}]
    Annotations.from_stack(stack).has_no_info("*", Match.any_value())


def test_the_deep_archive_is_asked_for(stack):
    CheckpointBucket(stack, "Bucket", deep_archive_days=180)
    (rule,) = bucket_in(stack)["Properties"]["LifecycleConfiguration"]["Rules"]
    assert rule["Transitions"][2] == {"StorageClass": "DEEP_ARCHIVE", "TransitionInDays": 180}


@pytest.mark.parametrize("kind", [CheckpointBucket, DatasetBucket])
def test_one_word_does_not_delete_a_bucket(kind, stack):
    kind(stack, "Bucket", removal_policy=cdk.RemovalPolicy.DESTROY)
    assert bucket_in(stack)["DeletionPolicy"] == "Retain"
    Annotations.from_stack(stack).has_warning("*", Match.string_like_regexp("but the bucket stays"))


def test_tear_05_two_words_delete_it_with_one_policy_for_all_statements(tmp_path):
    app = cdk.App(context={REMOVE_DATA: "true"}, outdir=str(tmp_path))
    stack = cdk.Stack(app, "Stack")
    bucket = CheckpointBucket(stack, "Bucket", removal_policy=cdk.RemovalPolicy.DESTROY)
    reader = iam.AccountPrincipal("123456789012")
    bucket.add_to_resource_policy(
        iam.PolicyStatement(actions=["s3:GetObject"], principals=[reader], resources=[bucket.arn_for_objects("*")])
    )
    template = Template.from_stack(stack)
    assert bucket_in(stack)["DeletionPolicy"] == "Delete"
    ((name, policy),) = template.find_resources("AWS::S3::BucketPolicy").items()
    statements = policy["Properties"]["PolicyDocument"]["Statement"]
    assert [statement["Effect"] for statement in statements] == ["Deny", "Allow", "Allow"]
    assert statements[0]["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert "s3:DeleteObject*" in statements[1]["Action"] and statements[2]["Action"] == "s3:GetObject"
    (emptying,) = template.find_resources("Custom::S3AutoDeleteObjects").values()
    assert emptying["DependsOn"] == [name]  # so that on deletion the bucket is emptied while the policy still allows it
    Annotations.from_stack(stack).has_warning("*", Match.string_like_regexp("with every version of every object"))


def test_a_bucket_has_two_removal_policies(stack):
    with pytest.raises(ValueError, match="A bucket takes RETAIN or DESTROY"):
        DatasetBucket(stack, "Bucket", removal_policy=cdk.RemovalPolicy.SNAPSHOT)


def test_transitions_can_be_left_out(stack):
    CheckpointBucket(stack, "Bucket", infrequent_access_days=None, glacier_days=None)
    (rule,) = bucket_in(stack)["Properties"]["LifecycleConfiguration"]["Rules"]
    assert "Transitions" not in rule


@pytest.mark.parametrize(
    ("days", "message"),
    [
        ({"infrequent_access_days": 7}, "infrequent_access_days is 7. Allowed: 30 or more"),
        ({"glacier_days": 59}, "glacier_days is 59. Allowed here: 60 or more"),
        ({"infrequent_access_days": None, "glacier_days": 0}, "glacier_days is 0. Allowed here: 1 or more"),
        ({"deep_archive_days": 90}, "deep_archive_days is 90. Allowed here: 91 or more"),
        ({"glacier_days": None, "deep_archive_days": 59}, "deep_archive_days is 59. Allowed here: 60 or more"),
        ({"noncurrent_days": 0}, "noncurrent_days is 0. Allowed: 1 or more"),
    ],
)
def test_days_that_s3_does_not_take_are_refused(days, message, stack):
    with pytest.raises(ValueError, match=message):
        CheckpointBucket(stack, "Bucket", **days)
