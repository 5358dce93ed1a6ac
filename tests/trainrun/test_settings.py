"""Settings that cannot work are refused, all of them at once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest

from trainrun.config import ConfigError, from_mapping
from trainrun.settings import CheckpointSettings, TrainSettings
from trainrun.spec import ClusterSpec, JobSpec, MonitoringSpec, RunSpec, ShutdownSpec, StorageSpec, TimeoutSpec


def test_all_that_is_wrong_is_said_together() -> None:
    wrong = {
        "run": "../other",
        "batch_tokens": 1000,
        "sequence_length": 300,
        "precision": "fp61",
        "collective_timeout_seconds": 0,
        "model": {"width": 30},
        "optimizer": {"learning_rate": 0, "beta2": 1.0, "warmup_steps": -1, "final_fraction": 2},
        "checkpoint": {"every_steps": 0, "keep": 1, "timeout_seconds": 0},
    }
    with pytest.raises(ConfigError) as found:
        from_mapping(TrainSettings, wrong)
    text = str(found.value)
    for name in ("precision", "width", "learning_rate", "beta2", "warmup_steps", "final_fraction", "every_steps", "keep"):
        assert name in text
    for name in ("model", "optimizer", "checkpoint", "precision"):
        del wrong[name]
    with pytest.raises(ConfigError) as found:
        from_mapping(TrainSettings, wrong)
    text = str(found.value)
    assert "run is '../other'" in text
    assert "not a multiple of sequence_length (300). The nearest that is: 900." in text
    assert "collective_timeout_seconds is 0" in text
    with pytest.raises(ConfigError, match="names a checkpoint's folder"):
        from_mapping(TrainSettings, {"run": "a/step-000000003"})


def test_defaults_are_right() -> None:
    assert from_mapping(TrainSettings, {}) == TrainSettings()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TimeoutSpec(meet=-1, stop_grace=0), "meet is -1. Allowed: 1 or more, in seconds.\nstop_grace is 0."),
        (
            lambda: TrainSettings(collective_timeout_seconds=math.inf),
            "collective_timeout_seconds is inf. Allowed: more than 0",
        ),
        (lambda: CheckpointSettings(timeout_seconds=math.inf), "timeout_seconds is inf. Allowed: more than 0, at most 31536000"),
        (lambda: CheckpointSettings(stop_seconds=math.nan), "stop_seconds is nan. Allowed: more than 0, at most 31536000"),
        (lambda: CheckpointSettings(most_failures=0), "most_failures is 0. Allowed: 1 (the first failed save ends the run) or"),
        (
            lambda: CheckpointSettings(keep_best=-1, keep_every_steps=-1),
            "keep_every_steps is -1. Allowed: 0 (none) or more.\nkeep_",
        ),
        (
            lambda: CheckpointSettings(every_steps="auto", failures_per_node_day=0),
            "failures_per_node_day is 0. Allowed: more",
        ),
        (
            lambda: CheckpointSettings(every_steps=50, failures_per_node_day=0.1),
            "failures_per_node_day is 0.1, but every_steps is 50, which does not look at it. Remove it",
        ),
        (
            lambda: CheckpointSettings(every_steps=50, keep_every_steps=50),
            "keep_every_steps is 50 and every_steps 50: every checkpoint would be kept, and keep (3) would mean nothing.",
        ),
        (
            lambda: CheckpointSettings(best="highest"),
            'best is "highest", but keep_best is 0: nothing is kept for its metric.',
        ),
        (
            lambda: TrainSettings(steps=100, checkpoint=CheckpointSettings(keep_every_steps=101)),
            "checkpoint.keep_every_steps is 101, and the run has 100 steps: no checkpoint would be kept for it.",
        ),
        (lambda: TrainSettings(seed=2**64), "seed is 18446744073709551616. Allowed: -2**63 to 2**63 - 1."),
        (lambda: TrainSettings(deepspeed=""), "deepspeed is empty. Allowed: a DeepSpeed configuration or its JSON"),
        (lambda: ShutdownSpec(max_restarts=-3), "max_restarts is -3. Allowed: 0 or more"),
        (lambda: MonitoringSpec(publish_seconds=float("nan")), "publish_seconds is nan. Allowed: more than 0"),
        (lambda: from_mapping(MonitoringSpec, {"publish_seconds": 10**400}), "publish_seconds must be a number"),
    ],
)
def test_a_specification_that_no_node_could_follow_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


def test_ranks_cannot_be_given_more_time_than_until_they_are_killed() -> None:
    def spec(stop_seconds: float) -> RunSpec:
        return RunSpec(
            run="run",
            region="us-east-1",
            cluster=ClusterSpec(name="c", instance_type="c7i.large", nodes_min=1, nodes_desired=1, nodes_max=1),
            job=JobSpec(entry_point="trainrun.pretrain", configuration={"checkpoint": {"stop_seconds": stop_seconds}}),
            storage=StorageSpec(location="s3://bucket/runs"),
            timeouts=TimeoutSpec(stop_grace=60),
        )

    assert spec(60).timeouts.stop_grace == 60
    with pytest.raises(ConfigError, match=r"checkpoint.stop_seconds is 61 and timeouts.stop_grace 60: the ranks would be killed"):
        spec(61)
