"""Four trn1.32xlarge in a network without a way to the internet."""

from pathlib import Path

import aws_cdk as cdk

from traincluster import (
    Capacity,
    CheckpointBucket,
    DataVolume,
    EfaLayout,
    TrainingCluster,
    TrainingJob,
    TrainingNetwork,
)

REGION = cdk.Environment(region="us-east-1")

app = cdk.App()
data = cdk.Stack(app, "TrainiumData", env=REGION)
checkpoints = CheckpointBucket(data, "Checkpoints")

run = cdk.Stack(app, "TrainiumRun", env=REGION)
TrainingCluster(
    run,
    "Cluster",
    # The zone is one of the region that by the library's record offers the type.
    network=TrainingNetwork(run, "Network", instance_type="trn1.32xlarge", isolated=True),
    instance_type="trn1.32xlarge",
    nodes=4,
    capacity=Capacity.on_demand(),
    # As the Neuron documentation has it. Without this the layout is that of the EC2 user guide; both work.
    efa_layout=EfaLayout(kind="efa", device_index=1),
    volumes=[DataVolume.checkpoints(size_gib=640)],
    checkpoints=checkpoints,
    job=TrainingJob(run="trainium", source=Path(__file__).with_name("project"), entry_point="train.py"),
)

app.synth()
