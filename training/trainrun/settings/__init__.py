"""The settings of a run, with their defaults. Standard library only: the CDK side checks a job's configuration against
them at synth, the node reads them at start."""

from trainrun.settings.checkpoint import CheckpointSettings
from trainrun.settings.finetune import FineTuneSettings
from trainrun.settings.model import ModelSettings
from trainrun.settings.optimizer import OptimizerSettings
from trainrun.settings.profile import ProfileSettings
from trainrun.settings.sharding import ShardingSettings
from trainrun.settings.train import TrainSettings
from trainrun.settings.weights import WeightsSettings

__all__ = [
    "CheckpointSettings",
    "FineTuneSettings",
    "ModelSettings",
    "OptimizerSettings",
    "ProfileSettings",
    "ShardingSettings",
    "TrainSettings",
    "WeightsSettings",
]
