"""Rules of what a cluster runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traincluster.rules.engine import check
from traincluster.rules.job import DeepSpeedBatchFacts, JobFacts, OffloadFacts
from trainrun.spec import BatchSizes


def findings(**changes):
    facts = {"batch_tokens": 4096, "sequence_length": 128, "processes_per_node": 1, "nodes": 2, "min_nodes": 1}
    return [(finding.level, finding.message) for finding in check(JobFacts(**{**facts, **changes}))]


def test_ela_10_a_batch_that_does_not_divide_among_all_ranks_is_an_error():
    ((level, message),) = findings(nodes=3)
    assert level == "error"
    assert "32 sequences (4,096 tokens of 128), which do not divide among 3 ranks" in message


def test_ela_10_a_batch_that_does_not_divide_when_nodes_are_lost_is_a_warning():
    ((level, message),) = findings(nodes=4)
    assert level == "warning"
    assert "With 3 of the nodes left they do not divide: then 1, 2, 4 of them train, the others wait." in message
    assert findings(nodes=4, min_nodes=4) == []


@pytest.mark.parametrize("nodes", [10**6, 10**400])
def test_more_nodes_than_anybody_has_are_judged_at_once(nodes):
    assert [level for level, _ in findings(nodes=nodes)] == ["error"]


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 12), st.data())
def test_nothing_is_found_just_when_every_size_divides(sequences, processes, nodes, data):
    least = data.draw(st.integers(1, nodes))
    found = findings(batch_tokens=sequences * 128, processes_per_node=processes, nodes=nodes, min_nodes=least)
    assert (not found) == all(sequences % (count * processes) == 0 for count in range(least, nodes + 1))


def batch_findings(*, nodes, min_nodes=None, processes=8, **sizes):
    facts = DeepSpeedBatchFacts(
        sizes=BatchSizes(**sizes), processes_per_node=processes, nodes=nodes, min_nodes=nodes if min_nodes is None else min_nodes
    )
    return [(finding.level, finding.message) for finding in check(facts)]


def test_ux_03_a_batch_of_65536_by_64_goes_with_64_ranks_and_not_with_48():
    assert batch_findings(train=65536, micro=64, nodes=8) == []
    ((level, message),) = batch_findings(train=65536, micro=64, nodes=6)
    assert level == "error"
    assert "65536 != 64 * GA * 48" in message


def test_ux_03_a_batch_that_does_not_go_with_fewer_nodes_is_a_warning():
    ((level, message),) = batch_findings(train=65536, micro=64, nodes=8, min_nodes=4)
    assert level == "warning"
    assert "With 5, 6, 7 of the 8 nodes left no rank trains." in message
    assert "65536 != 64 * GA * 40" in message


def test_accumulation_that_is_fixed_goes_with_one_number_of_ranks():
    ((level, _),) = batch_findings(train=65536, micro=64, accumulation=16, nodes=8, min_nodes=7)
    assert level == "warning"


def test_a_batch_that_the_ranks_make_up_gets_smaller_with_them():
    ((level, message),) = batch_findings(micro=4, accumulation=2, nodes=4, min_nodes=1)
    assert level == "warning"
    assert "a step gets smaller when nodes are lost" in message
    assert batch_findings(micro=4, accumulation=2, nodes=4) == []


def test_any_number_of_nodes_is_judged_at_once():
    assert [level for level, _ in batch_findings(train=2**40, micro=64, nodes=10**9 + 7)] == ["error"]


def offload_findings(**changes):
    facts = {"instance_type": "p4d.24xlarge", "memory_gib": 1152.0, "gib_per_node": 500.0, "gib_per_node_of_fewest": 500.0}
    return [(each.level, each.message) for each in check(OffloadFacts(**{**facts, "nodes": 2, "min_nodes": 1, **changes}))]


def test_ux_05_offload_beyond_the_memory_of_a_node_is_an_error():
    assert offload_findings() == []
    ((level, message),) = offload_findings(gib_per_node=1200.4)
    assert level == "error"
    assert message == "The ranks of each of 2 nodes offload at least 1,200 GiB, but a p4d.24xlarge has 1,152 GiB."


@pytest.mark.parametrize("changes", [{"gib_per_node": 1000.0}, {"gib_per_node_of_fewest": 1200.0}])
def test_ux_05_offload_that_leaves_little_or_grows_too_large_is_a_warning(changes):
    assert [level for level, _ in offload_findings(**changes)] == ["warning"]
