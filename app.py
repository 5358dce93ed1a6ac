"""The CDK app: reads the settings and makes the two reference stacks. Run it with `cdk synth` or `cdk deploy --all`."""

import sys
from pathlib import Path

import aws_cdk as cdk

from stacks.settings import read_settings
from stacks.training_cluster_stack import TrainingClusterStack
from stacks.training_data_stack import TrainingDataStack

app = cdk.App(stack_traces=False)
try:
    settings = read_settings(app.node.get_all_context(), default_file=Path(__file__).with_name("cluster.yaml"))
    data = TrainingDataStack(app, "TrainingDataStack", region=settings.region)
    TrainingClusterStack(app, "TrainingClusterStack", settings=settings, checkpoints=data.checkpoints, datasets=data.datasets)
except (ValueError, RuntimeError) as error:  # RuntimeError: what the CDK itself refuses, as jsii hands it on
    sys.exit(f"The settings do not make a cluster:\n{error}")
try:
    app.synth()
except RuntimeError as error:  # a refusal by the rules, as jsii hands it on: its traceback would say nothing more
    sys.exit(str(error))
