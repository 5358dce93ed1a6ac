"""What can go wrong with a job: what its ranks would refuse, once the nodes are paid for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from traincluster.rules.engine import rule
from traincluster.rules.finding import Finding
from trainrun.spec import BatchSizes, ConfigError


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """A job that trains by trainrun's own settings."""

    batch_tokens: int
    """Tokens of one optimizer step, over all ranks."""
    sequence_length: int
    processes_per_node: int
    nodes: int
    min_nodes: int

    @property
    def sequences(self) -> int:
        """Of one optimizer step."""
        return self.batch_tokens // self.sequence_length

    @property
    def usable_nodes(self) -> tuple[int, ...]:
        """Numbers of nodes among which they divide."""
        most = min(self.nodes, self.sequences)  # more nodes than sequences cannot divide them
        return tuple(n for n in range(self.min_nodes, most + 1) if not self.sequences % (n * self.processes_per_node))


@rule(
    "batch-divides",
    summary="The sequences of one optimizer step divide among the ranks, also when nodes are lost.",
    source="trainrun.data.stream: every rank has the same number of sequences, so that the step is the same at any size (ELA-10)",
    levels=("error", "warning"),
)
def batch_divides(facts: JobFacts) -> Iterator[Finding]:
    sequences = facts.sequences
    batch = f"One optimizer step has {sequences:,} sequences ({facts.batch_tokens:,} tokens of {facts.sequence_length:,})"
    fix = "Choose batch_tokens as a multiple of sequence_length times the number of ranks, for each number of nodes."
    if sequences % (facts.nodes * facts.processes_per_node):
        ranks = facts.nodes * facts.processes_per_node
        yield Finding("error", "batch-divides", f"{batch}, which do not divide among {ranks:,} ranks.", fix)
        return
    usable = facts.usable_nodes
    uneven = [str(nodes) for nodes in range(facts.min_nodes, facts.nodes) if nodes not in usable]
    if uneven:
        some = ", ".join(uneven[:5]) + (", ..." if len(uneven) > 5 else "")
        train = ", ".join(map(str, usable[:5])) + (", ..." if len(usable) > 5 else "")
        message = f"{batch}. With {some} of the nodes left they do not divide: then {train} of them train, the others wait."
        yield Finding("warning", "batch-divides", message, fix)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedBatchFacts:
    """The batch of a job that has a DeepSpeed configuration."""

    sizes: BatchSizes
    """As the file and the settings give them."""
    processes_per_node: int
    nodes: int
    min_nodes: int


@rule(
    "deepspeed-batch",
    summary="The batch sizes of a DeepSpeed file go with the number of ranks, also when nodes are lost.",
    source="DeepSpeed 0.19 runtime/config.py (train_batch_size = micro batch x accumulation x ranks), "
    "deepspeedai/DeepSpeed#6914 (UX-03)",
    levels=("error", "warning"),
)
def deepspeed_batch(facts: DeepSpeedBatchFacts) -> Iterator[Finding]:
    fix = "Change the sizes, or leave gradient_accumulation_steps out so that it follows."
    if problem := _batch_problem(facts, facts.nodes):
        yield Finding("error", "deepspeed-batch", problem, fix)
        return
    if facts.min_nodes == facts.nodes:
        return
    if facts.sizes.train is None:
        message = "The DeepSpeed file gives no train_batch_size, so that a step gets smaller when nodes are lost."
        yield Finding("warning", "deepspeed-batch", message, "Give train_batch_size and leave gradient_accumulation_steps out.")
        return
    # more nodes than sequences were an error already
    uneven = [nodes for nodes in range(facts.min_nodes, facts.nodes) if _batch_problem(facts, nodes)]
    if uneven:
        some = ", ".join(map(str, uneven[:5])) + (", ..." if len(uneven) > 5 else "")
        message = f"With {some} of the {facts.nodes} nodes left no rank trains. {_batch_problem(facts, uneven[0])}"
        yield Finding("warning", "deepspeed-batch", message, fix)


def _batch_problem(facts: DeepSpeedBatchFacts, nodes: int) -> str | None:
    try:
        facts.sizes.with_ranks(nodes * facts.processes_per_node)
    except ConfigError as error:
        return str(error)
    return None


@dataclass(frozen=True, kw_only=True)
class OffloadFacts:
    """A job of the bundled GPT that offloads to its nodes' memory."""

    instance_type: str
    memory_gib: float
    """Of one node."""
    gib_per_node: float
    """What its ranks offload, with all nodes there."""
    gib_per_node_of_fewest: float
    """The same with the fewest nodes on which training goes on: fewer shards are larger."""
    nodes: int
    min_nodes: int


@rule(
    "offload-fits-host",
    summary="What is offloaded to the CPU fits into the memory of the nodes.",
    source="ZeRO-Offload (arXiv 2101.06840): fp32 weights, gradients and moments, 16 bytes a parameter, lie in the host's "
    "memory; deepspeedai/DeepSpeed#2971 (UX-05)",
    levels=("error", "warning"),
)
def offload_fits_host(facts: OffloadFacts) -> Iterator[Finding]:
    has = f"a {facts.instance_type} has {facts.memory_gib:,.0f} GiB"
    fix = (
        "Use more nodes or a type with more memory, or let sharding.offload_optimizer and offload_parameters be 'none' or 'nvme'."
    )
    if facts.gib_per_node > facts.memory_gib:
        message = f"The ranks of each of {facts.nodes} nodes offload at least {facts.gib_per_node:,.0f} GiB, but {has}."
        yield Finding("error", "offload-fits-host", message, fix)
    elif facts.gib_per_node > FILLED * facts.memory_gib:
        message = (
            f"The ranks of each node offload at least {facts.gib_per_node:,.0f} GiB, and {has}, which leaves little for the rest."
        )
        yield Finding("warning", "offload-fits-host", message, fix)
    elif facts.gib_per_node_of_fewest > facts.memory_gib:
        message = (
            f"When only {facts.min_nodes} of {facts.nodes} nodes are left, their ranks offload at least "
            f"{facts.gib_per_node_of_fewest:,.0f} GiB each, but {has}."
        )
        yield Finding("warning", "offload-fits-host", message, fix)


FILLED = 0.8
"""Part of a node's memory beyond which little is left for data, its cache and checkpoints under way."""
