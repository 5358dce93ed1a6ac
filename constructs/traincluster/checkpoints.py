"""Buckets that outlive every run: checkpoints and datasets."""

from __future__ import annotations

from aws_cdk import Acknowledgment, Duration, RemovalPolicy, Validations
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3

from constructs import Construct
from traincluster.rules import check
from traincluster.rules.report import report
from traincluster.rules.storage import BucketFacts

REMOVE_DATA = "traincluster:remove-data-on-destroy"
"""The second word: context that has to be true as well before a bucket is deleted with its stack."""

# S3 does not move objects to STANDARD_IA before they are this old, nor on to GLACIER before they were as long there.
_SHORTEST_STAY_DAYS = 30


class _SafeBucket(s3.Bucket):
    """A private, versioned, encrypted bucket that refuses plain HTTP and stays when its stack goes, unless told twice."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        encryption_key: kms.IKey | None,
        noncurrent_days: int,
        transitions: list[s3.Transition],
        removal_policy: RemovalPolicy,
        archived_after: int | None = None,
    ) -> None:
        if removal_policy not in (RemovalPolicy.DESTROY, RemovalPolicy.RETAIN):
            raise ValueError(f"removal_policy is {removal_policy.name}. A bucket takes RETAIN or DESTROY.")
        if noncurrent_days < 1:
            raise ValueError(f"noncurrent_days is {noncurrent_days}. Allowed: 1 or more.")
        wanted = removal_policy == RemovalPolicy.DESTROY
        confirmed = str(scope.node.try_get_context(REMOVE_DATA)).lower() == "true"
        stays = not (wanted and confirmed)
        super().__init__(
            scope,
            construct_id,
            encryption=s3.BucketEncryption.KMS if encryption_key else s3.BucketEncryption.S3_MANAGED,
            encryption_key=encryption_key,
            # One data key for many objects: without it every shard read is a call to KMS.
            bucket_key_enabled=True if encryption_key else None,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            enforce_ssl=True,
            versioned=True,
            removal_policy=RemovalPolicy.RETAIN if stays else RemovalPolicy.DESTROY,
            # CloudFormation deletes empty buckets only. The CDK's function empties it, all versions included.
            auto_delete_objects=True if not stays else None,
            lifecycle_rules=[
                s3.LifecycleRule(
                    id="CleanUp",
                    # A killed upload leaves parts that are billed and that no listing shows.
                    abort_incomplete_multipart_upload_after=Duration.days(7),
                    noncurrent_version_expiration=Duration.days(noncurrent_days),
                    # What a deleted object leaves once its versions are gone; it would slow listings down.
                    expired_object_delete_marker=True,
                    transitions=transitions or None,
                ),
            ],
        )
        if stays:  # and its policy with it
            assert self.policy is not None
            self.policy.apply_removal_policy(RemovalPolicy.RETAIN)
        report(
            self,
            check(
                BucketFacts(
                    name=self.node.path, is_removal_wanted=wanted, is_removal_confirmed=confirmed, archived_after=archived_after
                )
            ),
        )
        Validations.of(self).acknowledge(
            Acknowledgment(
                id="AwsSolutions-S1",
                reason="Access logs would need one more bucket that nobody empties; CloudTrail's data events audit objects.",
            )
        )


class CheckpointBucket(_SafeBucket):
    """Where runs keep their checkpoints, metrics and results.

    Versioned, encrypted, closed to the public and to plain HTTP; retained when the stack is destroyed, so that the next
    deploy can resume. No rule expires a checkpoint: retention belongs to the training loop, which knows the last good one.

    Example:
        >>> checkpoints = CheckpointBucket(stack, "Checkpoints")                      # doctest: +SKIP
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        encryption_key: kms.IKey | None = None,
        infrequent_access_days: int | None = 30,
        glacier_days: int | None = 90,
        deep_archive_days: int | None = None,
        noncurrent_days: int = 7,
        removal_policy: RemovalPolicy = RemovalPolicy.RETAIN,
    ) -> None:
        """Make the bucket.

        Args:
            scope: where the construct goes.
            construct_id: its id there.
            encryption_key: key to encrypt with; None means S3's own (SSE-S3).
            infrequent_access_days: age at which objects move to STANDARD_IA, 30 or more; None keeps them in STANDARD.
                They stay readable at once; reading costs more.
            glacier_days: age at which objects move on to GLACIER, at least 30 days later; None means never. An object there
                cannot be read until it is restored, which takes hours, so that a run that pauses for so long cannot resume
                by itself.
            deep_archive_days: age at which objects move on to DEEP_ARCHIVE, after GLACIER; None, the default, means never.
            noncurrent_days: how long a deleted or overwritten object can still be brought back, in days.
            removal_policy: RETAIN, or DESTROY to have the bucket deleted with its stack, with all that is in it. DESTROY
                takes a second word: the context "traincluster:remove-data-on-destroy" has to be true as well.

        Raises:
            ValueError: days that S3 does not take, or another removal policy.
        """
        super().__init__(
            scope,
            construct_id,
            encryption_key=encryption_key,
            noncurrent_days=noncurrent_days,
            transitions=_transitions(infrequent_access_days, glacier_days, deep_archive_days),
            removal_policy=removal_policy,
            archived_after=min((days for days in (glacier_days, deep_archive_days) if days is not None), default=None),
        )


class DatasetBucket(_SafeBucket):
    """Where token datasets are. As `CheckpointBucket`, but objects stay in STANDARD: every epoch reads them all."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        encryption_key: kms.IKey | None = None,
        noncurrent_days: int = 7,
        removal_policy: RemovalPolicy = RemovalPolicy.RETAIN,
    ) -> None:
        """Make the bucket.

        Args:
            scope: where the construct goes.
            construct_id: its id there.
            encryption_key: key to encrypt with; None means S3's own (SSE-S3).
            noncurrent_days: how long a deleted or overwritten object can still be brought back, in days.
            removal_policy: as in `CheckpointBucket`.

        Raises:
            ValueError: days that S3 does not take, or another removal policy.
        """
        super().__init__(
            scope,
            construct_id,
            encryption_key=encryption_key,
            noncurrent_days=noncurrent_days,
            transitions=[],
            removal_policy=removal_policy,
        )


def _transitions(
    infrequent_access_days: int | None, glacier_days: int | None, deep_archive_days: int | None
) -> list[s3.Transition]:
    transitions = []
    if infrequent_access_days is not None:
        if infrequent_access_days < _SHORTEST_STAY_DAYS:
            raise ValueError(
                f"infrequent_access_days is {infrequent_access_days}. Allowed: {_SHORTEST_STAY_DAYS} or more, or None for never."
            )
        transitions.append(
            s3.Transition(storage_class=s3.StorageClass.INFREQUENT_ACCESS, transition_after=Duration.days(infrequent_access_days))
        )
    if glacier_days is not None:
        earliest = (infrequent_access_days + _SHORTEST_STAY_DAYS) if infrequent_access_days is not None else 1
        if glacier_days < earliest:
            raise ValueError(f"glacier_days is {glacier_days}. Allowed here: {earliest} or more, or None for never.")
        transitions.append(s3.Transition(storage_class=s3.StorageClass.GLACIER, transition_after=Duration.days(glacier_days)))
    if deep_archive_days is not None:
        earliest = (glacier_days or infrequent_access_days or 0) + (1 if glacier_days else _SHORTEST_STAY_DAYS)
        if deep_archive_days < earliest:
            raise ValueError(f"deep_archive_days is {deep_archive_days}. Allowed here: {earliest} or more, or None for never.")
        transitions.append(
            s3.Transition(storage_class=s3.StorageClass.DEEP_ARCHIVE, transition_after=Duration.days(deep_archive_days))
        )
    return transitions
