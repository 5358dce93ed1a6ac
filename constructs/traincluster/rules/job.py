"""What can go wrong with a job: what its ranks would refuse, once the nodes are paid for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from traincluster.rules.engine import rule
from traincluster.rules.finding import Finding


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """A job that trains by trainrun's own settings."""

    batch_tokens: int
    """Tokens of one optimizer step, over all ranks."""
    sequence_length: int
    processes_per_node: int
    nodes: int
    min_nodes: int


@rule(
    "batch-divides",
    summary="The sequences of one optimizer step divide among the ranks, also when nodes are lost.",
    source="trainrun.data.stream: every rank has the same number of sequences, so that the step is the same at any size (ELA-10)",
    levels=("error", "warning"),
)
def batch_divides(facts: JobFacts) -> Iterator[Finding]:
    sequences = facts.batch_tokens // facts.sequence_length
    batch = f"One optimizer step has {sequences:,} sequences ({facts.batch_tokens:,} tokens of {facts.sequence_length:,})"
    fix = "Choose batch_tokens as a multiple of sequence_length times the number of ranks, for each number of nodes."
    if sequences % (facts.nodes * facts.processes_per_node):
        ranks = facts.nodes * facts.processes_per_node
        yield Finding("error", "batch-divides", f"{batch}, which do not divide among {ranks:,} ranks.", fix)
        return
    # more nodes than sequences cannot divide either, so there is no need to look further
    smaller = range(facts.min_nodes, min(facts.nodes, sequences + 1))
    uneven = [str(nodes) for nodes in smaller if sequences % (nodes * facts.processes_per_node)]
    if uneven:
        some = ", ".join(uneven[:5]) + (", ..." if len(uneven) > 5 else "")
        yield Finding(
            "warning", "batch-divides", f"{batch}. With {some} of the nodes left they do not divide: no rank trains.", fix
        )
