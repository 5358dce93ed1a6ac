"""Buckets that outlive every run: checkpoints and datasets."""

from __future__ import annotations

from aws_cdk import Acknowledgment, Annotations, Duration, RemovalPolicy, Validations
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3

from constructs import Construct

# S3 does not move objects to STANDARD_IA before they are this old, nor on to GLACIER before they were as long there.
_SHORTEST_STAY_DAYS = 30


class _RetainedBucket(s3.Bucket):
    """A private, versioned, encrypted bucket that refuses plain HTTP and stays when its stack goes."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        encryption_key: kms.IKey | None,
        noncurrent_days: int,
        transitions: list[s3.Transition],
    ) -> None:
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
            removal_policy=RemovalPolicy.RETAIN,
            lifecycle_rules=[
                s3.LifecycleRule(
                    id="CleanUp",
                    # A killed upload leaves parts that are billed and that no listing shows.
                    abort_incomplete_multipart_upload_after=Duration.days(7),
                    noncurrent_version_expiration=Duration.days(noncurrent_days),
                    transitions=transitions or None,
                ),
            ],
        )
        # The bucket stays, so its policy has to stay with it.
        assert self.policy is not None
        self.policy.apply_removal_policy(RemovalPolicy.RETAIN)
        Validations.of(self).acknowledge(
            Acknowledgment(
                id="AwsSolutions-S1",
                reason="Access logs would need one more bucket that nobody empties; CloudTrail's data events audit objects.",
            )
        )


class CheckpointBucket(_RetainedBucket):
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
        glacier_days: int | None = None,
        noncurrent_days: int = 7,
    ) -> None:
        """Make the bucket.

        Args:
            scope: where the construct goes.
            construct_id: its id there.
            encryption_key: key to encrypt with; None means S3's own (SSE-S3).
            infrequent_access_days: age at which objects move to STANDARD_IA, 30 or more; None keeps them in STANDARD.
                They stay readable at once; reading costs more.
            glacier_days: age at which objects move on to GLACIER, at least 30 days later; None, the default, never. An
                object there cannot be read until it is restored, which takes hours, so that a run that pauses for so long
                cannot resume by itself. 90 suits an archive of finished runs.
            noncurrent_days: how long a deleted or overwritten object can still be brought back, in days.

        Raises:
            ValueError: days that S3 does not take.
        """
        super().__init__(
            scope,
            construct_id,
            encryption_key=encryption_key,
            noncurrent_days=noncurrent_days,
            transitions=_transitions(infrequent_access_days, glacier_days),
        )
        if glacier_days is not None:
            Annotations.of(self).add_warning_v2(
                "traincluster:glacierCheckpoints",
                f"Checkpoints move to GLACIER after {glacier_days} days. A run that has been paused for longer cannot resume "
                "until its newest checkpoint is restored from there by hand.",
            )


class DatasetBucket(_RetainedBucket):
    """Where token datasets are. As `CheckpointBucket`, but objects stay in STANDARD: every epoch reads them all."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        encryption_key: kms.IKey | None = None,
        noncurrent_days: int = 7,
    ) -> None:
        """Make the bucket.

        Args:
            scope: where the construct goes.
            construct_id: its id there.
            encryption_key: key to encrypt with; None means S3's own (SSE-S3).
            noncurrent_days: how long a deleted or overwritten object can still be brought back, in days.
        """
        super().__init__(scope, construct_id, encryption_key=encryption_key, noncurrent_days=noncurrent_days, transitions=[])


def _transitions(infrequent_access_days: int | None, glacier_days: int | None) -> list[s3.Transition]:
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
    return transitions
