"""Traincluster: AWS CDK constructs that turn an account into a place to train large models."""

from traincluster.access import SshAccess
from traincluster.capacity import Capacity
from traincluster.checkpoints import CheckpointBucket, DatasetBucket
from traincluster.cluster import TrainingCluster
from traincluster.efa import EfaLayout
from traincluster.image import NodeImage
from traincluster.instances import InstanceType, instance_type
from traincluster.job import TrainingJob
from traincluster.network import TrainingNetwork
from traincluster.volumes import DataVolume

__all__ = [
    "Capacity",
    "CheckpointBucket",
    "DataVolume",
    "DatasetBucket",
    "EfaLayout",
    "InstanceType",
    "NodeImage",
    "SshAccess",
    "TrainingCluster",
    "TrainingJob",
    "TrainingNetwork",
    "instance_type",
]
