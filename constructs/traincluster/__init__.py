"""Traincluster: AWS CDK constructs that turn an account into a place to train large models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traincluster.access import SshAccess
    from traincluster.capacity import Capacity
    from traincluster.checkpoints import CheckpointBucket, DatasetBucket
    from traincluster.cluster import TrainingCluster
    from traincluster.efa import EfaLayout
    from traincluster.efs import ElasticFileSystem
    from traincluster.image import NodeImage
    from traincluster.instances import InstanceType, instance_type
    from traincluster.job import TrainingJob
    from traincluster.lustre import DataRepository, LustreFileSystem
    from traincluster.network import TrainingNetwork
    from traincluster.notifications import NotificationTopic
    from traincluster.readiness import Readiness
    from traincluster.rules.report import acknowledge
    from traincluster.volumes import DataVolume

# Imported when they are first used: each module of aws_cdk that an app does not need is up to a tenth of a second at synth.
_HOMES = {
    "Capacity": "capacity",
    "CheckpointBucket": "checkpoints",
    "DataRepository": "lustre",
    "DataVolume": "volumes",
    "DatasetBucket": "checkpoints",
    "EfaLayout": "efa",
    "ElasticFileSystem": "efs",
    "InstanceType": "instances",
    "LustreFileSystem": "lustre",
    "NodeImage": "image",
    "NotificationTopic": "notifications",
    "Readiness": "readiness",
    "SshAccess": "access",
    "TrainingCluster": "cluster",
    "TrainingJob": "job",
    "TrainingNetwork": "network",
    "acknowledge": "rules.report",
    "instance_type": "instances",
}

__all__ = [
    "Capacity",
    "CheckpointBucket",
    "DataRepository",
    "DataVolume",
    "DatasetBucket",
    "EfaLayout",
    "ElasticFileSystem",
    "InstanceType",
    "LustreFileSystem",
    "NodeImage",
    "NotificationTopic",
    "Readiness",
    "SshAccess",
    "TrainingCluster",
    "TrainingJob",
    "TrainingNetwork",
    "acknowledge",
    "instance_type",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
