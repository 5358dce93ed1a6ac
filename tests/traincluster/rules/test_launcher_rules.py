"""Rules of what starts the ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from traincluster import NodeImage, TrainingJob
from traincluster.job_facts import binding_facts, job_facts, launcher_facts
from traincluster.rules.engine import check
from trainrun.spec import ClusterSpec

OWN = NodeImage(ami="ami-0123456789abcdef0")
AWS = NodeImage(ami="/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id")
CLUSTER = ClusterSpec(name="c", instance_type="p5.48xlarge", nodes_min=3, nodes_desired=3, nodes_max=3, processes_per_node=8)


@pytest.mark.parametrize(
    ("launcher", "image", "environment", "found"),
    [
        ("mpirun", OWN, {}, 1),
        ("mpirun", OWN, {"PATH": "/opt/mpi/bin"}, 0),
        ("mpirun", AWS, {}, 0),
        ("torchrun", OWN, {}, 0),
    ],
)
def test_an_image_of_ones_own_may_lack_open_mpi(launcher, image, environment, found):
    job = TrainingJob(run="r", launcher=launcher, environment=environment)
    findings = check(launcher_facts(job, image))
    assert [(finding.level, finding.rule) for finding in findings] == [("warning", "mpirun-is-in-image")] * found
    assert all("ami-0123456789abcdef0" in finding.message for finding in findings)


def test_the_batch_of_a_program_that_is_not_ours_is_none_of_the_rules_business():
    assert job_facts(TrainingJob(run="r"), CLUSTER, memory_gib=2048.0)
    assert not job_facts(TrainingJob(run="r", entry_point="/usr/bin/all_reduce_perf"), CLUSTER, memory_gib=2048.0)


GPUS = ClusterSpec(
    name="c",
    instance_type="p5.48xlarge",
    nodes_min=1,
    nodes_desired=1,
    nodes_max=1,
    accelerator="nvidia",
    accelerators_per_node=8,
    processes_per_node=8,
)


@pytest.mark.parametrize(
    ("numa", "cluster", "said"),
    [
        ("node", GPUS, ""),
        ("auto", replace(GPUS, processes_per_node=4), ""),
        ("none", replace(GPUS, accelerator="none", accelerators_per_node=0), ""),
        ("node", replace(GPUS, processes_per_node=4), "have 4 ranks for 8 NVIDIA GPUs"),
        ("exclusive", replace(GPUS, accelerator="neuron"), "have no NVIDIA GPUs"),
        ("socket", replace(GPUS, accelerator="none", accelerators_per_node=0, processes_per_node=1), "have no NVIDIA GPUs"),
    ],
)
def test_binding_that_would_be_ignored_is_refused(numa, cluster, said):
    findings = check(binding_facts(TrainingJob(run="r", numa=numa), cluster))
    assert [(finding.level, finding.rule) for finding in findings] == [("error", "numa-needs-a-gpu-per-rank")] * bool(said)
    assert all(said in finding.message for finding in findings)
