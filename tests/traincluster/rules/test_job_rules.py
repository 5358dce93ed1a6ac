"""Rules of what a cluster runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traincluster.rules.engine import check
from traincluster.rules.job import JobFacts


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
    assert "With 3 of the nodes left" in message
    assert findings(nodes=4, min_nodes=4) == []


@pytest.mark.parametrize("nodes", [10**6, 10**400])
def test_more_nodes_than_anybody_has_are_judged_at_once(nodes):
    assert [level for level, _ in findings(nodes=nodes)] == ["error"]


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 12), st.data())
def test_nothing_is_found_just_when_every_size_divides(sequences, processes, nodes, data):
    least = data.draw(st.integers(1, nodes))
    found = findings(batch_tokens=sequences * 128, processes_per_node=processes, nodes=nodes, min_nodes=least)
    assert (not found) == all(sequences % (count * processes) == 0 for count in range(least, nodes + 1))
