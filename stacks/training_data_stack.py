"""TrainingDataStack: what outlives every run."""

from __future__ import annotations

from aws_cdk import CfnOutput, RemovalPolicy, Stack
from aws_cdk import aws_kms as kms

from constructs import Construct
from traincluster import CheckpointBucket, DatasetBucket


class TrainingDataStack(Stack):
    """The checkpoint bucket, the dataset bucket and the key that encrypts both.

    All three are retained: `cdk destroy` of this stack leaves them in the account, where only a person deletes them.
    """

    def __init__(self, scope: Construct, construct_id: str) -> None:
        super().__init__(scope, construct_id, description="Traincluster: checkpoints and datasets, which outlive every run")
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
