"""16 p5.48xlarge in a Capacity Block, with a Lustre file system that they reach by EFA.

Deploy it with `cdk deploy --all -c block=cr-... -c zone=use1-az6`.
"""

import aws_cdk as cdk

from traincluster import (
    Capacity,
    CheckpointBucket,
    DatasetBucket,
    LustreFileSystem,
    TrainingCluster,
    TrainingJob,
    TrainingNetwork,
)

REGION = cdk.Environment(region="us-east-1")

app = cdk.App()

# What outlives the run has a stack of its own.
data = cdk.Stack(app, "P5Data", env=REGION)
checkpoints = CheckpointBucket(data, "Checkpoints")
corpus = DatasetBucket(data, "Corpus")

run = cdk.Stack(app, "P5Run", env=REGION)
# The zone of the block, by its id, which means the same place in every account.
network = TrainingNetwork(run, "Network", availability_zone=app.node.try_get_context("zone") or "use1-az6")
# 4.8 TiB is the step in which an EFA file system of 1000 MB/s per TiB grows. Its files are objects of the bucket.
scratch = LustreFileSystem(
    run, "Scratch", network=network, capacity_gib=4800, throughput_per_tib=1000, efa=True, linked_bucket=corpus
)
cluster = TrainingCluster(
    run,
    "Cluster",
    network=network,
    instance_type="p5.48xlarge",
    nodes=16,
    min_nodes=14,
    capacity=Capacity.block(app.node.try_get_context("block") or "cr-0123456789abcdef0"),
    checkpoints=checkpoints,
    file_systems=[scratch],
    job=TrainingJob(
        run="gpt-3b",
        configuration={
            "data": "/fsx/corpus",
            "steps": 100_000,
            "batch_tokens": 4_194_304,
            "sequence_length": 4096,
            "precision": "bf16",
            "model": {"layers": 32, "width": 2560, "heads": 32},
            "checkpoint": {"every_steps": 250},
        },
    ),
)
cdk.CfnOutput(run, "RunLocation", value=cluster.run_location)

app.synth()
