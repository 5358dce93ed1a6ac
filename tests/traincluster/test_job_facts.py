"""What a synth knows of a job's batch and memory."""

import pytest

from traincluster import TrainingJob
from traincluster.job_facts import job_facts
from traincluster.rules.engine import check
from trainrun.spec import ClusterSpec

LLAMA = {"preset": "llama3-70b"}
BIG_BATCH = {"batch_tokens": 2**22, "sequence_length": 4096, "micro_batch": 1}


def found(configuration, *, nodes=8, min_nodes=None, memory_gib=1152.0, **job):
    cluster = ClusterSpec(
        name="c",
        instance_type="p4d.24xlarge",
        nodes_min=nodes if min_nodes is None else min_nodes,
        nodes_desired=nodes,
        nodes_max=nodes,
        processes_per_node=8,
    )
    facts = job_facts(TrainingJob(run="r", configuration=configuration, **job), cluster, memory_gib=memory_gib)
    return {(finding.level, finding.rule) for each in facts for finding in check(each)}


def test_ux_03_a_deepspeed_batch_is_checked_against_nodes_and_processes():
    sizes = {"deepspeed": {"train_batch_size": 65536, "train_micro_batch_size_per_gpu": 64}}
    assert found(sizes, nodes=8) == set()
    assert ("error", "deepspeed-batch") in found(sizes, nodes=6)


def test_ux_03_scripts_of_the_users_own_are_checked_too_for_start_reads_the_same(tmp_path):
    (tmp_path / "train.py").touch()
    job = {"source": tmp_path, "entry_point": "train.py"}
    assert found({"deepspeed": {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3}}, nodes=2, **job) == {
        ("error", "deepspeed-batch")
    }


def test_sizes_that_the_ranks_make_up_always_divide():
    assert found({"deepspeed": {"train_micro_batch_size_per_gpu": 3}}, nodes=5) == set()


@pytest.mark.parametrize(
    ("nodes", "memory_gib", "levels"),
    [(2, 1152.0, set()), (1, 1152.0, {"warning"}), (1, 1024.0, {"error"}), (1, 512.0, {"error"})],
)
def test_ux_05_70b_by_offload_needs_16_bytes_a_parameter_of_the_nodes_memory(nodes, memory_gib, levels):
    """68.5 billion parameters without the embeddings: 1,021 GiB in fp32 states, shared by the nodes."""
    offload = {"offload_optimizer": {"device": "cpu"}}
    configuration = {
        **BIG_BATCH,
        "model": LLAMA,
        "precision": "bf16",
        "deepspeed": {"zero_optimization": {"stage": 3, **offload}},
    }
    assert found(configuration, nodes=nodes, memory_gib=memory_gib) == {(level, "offload-fits-host") for level in levels}


def test_a_step_of_examples_is_divided_as_such():
    assert found({"batch_examples": 64}, nodes=8, entry_point="trainrun.pretrain") == set()
    assert ("error", "batch-divides") in found({"batch_examples": 60}, nodes=8)
