"""Fine-tuning on 4 g6e.48xlarge of spare capacity: when EC2 takes nodes back, the rest goes on from the last checkpoint.

Deploy it with `cdk deploy --all -c base=s3://BUCKET/first-run`.
"""

from pathlib import Path

import aws_cdk as cdk
from aws_cdk import aws_s3 as s3

from traincluster import Capacity, CheckpointBucket, DatasetBucket, TrainingCluster, TrainingJob, TrainingNetwork

app = cdk.App()
base = app.node.try_get_context("base") or "s3://my-checkpoints/first-run"

data = cdk.Stack(app, "FineTuningData")
checkpoints = CheckpointBucket(data, "Checkpoints")
dataset = DatasetBucket(data, "Dataset")

run = cdk.Stack(app, "FineTuningRun")
cluster = TrainingCluster(
    run,
    "Cluster",
    network=TrainingNetwork(run, "Network", instance_type="g6e.48xlarge"),
    instance_type="g6e.48xlarge",
    nodes=4,
    min_nodes=1,
    capacity=Capacity.spot(),
    checkpoints=checkpoints,
    job=TrainingJob(
        run="fine-tuning",
        source=Path(__file__).with_name("project"),
        entry_point="fine_tune.py",
        environment={"BASE_CHECKPOINT": base},
        configuration={
            "data": f"s3://{dataset.bucket_name}/conversations",
            "steps": 2000,
            "batch_tokens": 262_144,
            "sequence_length": 2048,
            "precision": "bf16",
            "optimizer": {"learning_rate": 0.0001, "warmup_steps": 50},
            # Spot gives two minutes' notice: a checkpoint comes often, and once more at the notice.
            "checkpoint": {"every_steps": 20},
        },
    ),
)
cluster.grant_read(dataset, "conversations/*")
bucket, _, folder = base.removeprefix("s3://").partition("/")
cluster.grant_read(s3.Bucket.from_bucket_name(run, "Base", bucket), f"{folder}/*")

app.synth()
