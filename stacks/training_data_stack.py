"""TrainingDataStack: what outlives every run."""

from __future__ import annotations

from aws_cdk import CfnOutput, Environment, RemovalPolicy, Stack
from aws_cdk import aws_kms as kms

from constructs import Construct
from traincluster import CheckpointBucket, DatasetBucket
from traincluster.rules import check
from traincluster.rules.network import LeftBehind
from traincluster.rules.report import report


class TrainingDataStack(Stack):
    """The checkpoint bucket, the dataset bucket and the key that encrypts both.

    All three are retained: `cdk destroy` of this stack leaves them in the account, where only a person deletes them.
    """

    def __init__(self, scope: Construct, construct_id: str, *, region: str | None = None) -> None:
        super().__init__(
            scope,
            construct_id,
            description="Traincluster: checkpoints and datasets, which outlive every run",
            env=Environment(region=region),
        )
        key = kms.Key(
            self,
            "Key",
            description="Encrypts checkpoints and datasets of traincluster",
            enable_key_rotation=True,
            removal_policy=RemovalPolicy.RETAIN,
        )
        self.checkpoints = CheckpointBucket(self, "Checkpoints", encryption_key=key)
        self.datasets = DatasetBucket(self, "Datasets", encryption_key=key)
        CfnOutput(self, "CheckpointBucketName", value=self.checkpoints.bucket_name, description="Checkpoints and results of runs")
        CfnOutput(self, "DatasetBucketName", value=self.datasets.bucket_name, description="Token datasets")
        stays = (
            "the checkpoint bucket",
            "the dataset bucket",
            "the key that encrypts both, without which nothing in them can be read",
        )
        report(self, check(LeftBehind(stays=stays)))
