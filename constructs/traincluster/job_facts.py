"""What the rules see of a job."""

from __future__ import annotations

from aws_cdk import Token

from traincluster.image import NodeImage
from traincluster.job import TrainingJob
from traincluster.rules.job import DeepSpeedBatchFacts, JobFacts, OffloadFacts
from traincluster.rules.launcher import BindingFacts, LauncherFacts
from traincluster.rules.software import SoftwareFacts
from trainrun.spec import BatchSizes, ClusterSpec, batch_sizes, host_bytes_of_bundled, is_program

Facts = JobFacts | DeepSpeedBatchFacts | OffloadFacts


def job_facts(job: TrainingJob, cluster: ClusterSpec, *, memory_gib: float) -> list[Facts]:
    """The facts of a job on a cluster.

    Of a script of the user's own it is known only that `trainrun.start` will read the configuration, not what it trains.

    Args:
        memory_gib: of one node.
    """
    sizes = batch_sizes(job.inlined)
    facts: list[Facts] = []
    if sizes != BatchSizes():
        facts.append(
            DeepSpeedBatchFacts(
                sizes=sizes, processes_per_node=cluster.processes_per_node, nodes=cluster.nodes_max, min_nodes=cluster.nodes_min
            )
        )
    if job.source is not None or is_program(job.entry_point):
        return facts
    settings = job.settings
    if sizes == BatchSizes() or sizes.train is not None:  # else the step has what all ranks take together
        examples = settings.batch_examples * settings.sequence_length  # as tokens, none of which may be missing
        facts.append(
            JobFacts(
                batch_tokens=examples or settings.batch_tokens,
                sequence_length=settings.sequence_length,
                processes_per_node=cluster.processes_per_node,
                nodes=cluster.nodes_max,
                min_nodes=cluster.nodes_min,
            )
        )
    if job.entry_point != TrainingJob.entry_point:
        return facts  # the size of another model is not known here
    full, fewest = (
        cluster.processes_per_node * host_bytes_of_bundled(settings, ranks=nodes * cluster.processes_per_node)
        for nodes in (cluster.nodes_max, cluster.nodes_min)
    )
    if full:
        facts.append(
            OffloadFacts(
                instance_type=cluster.instance_type,
                memory_gib=memory_gib,
                gib_per_node=full / 2**30,
                gib_per_node_of_fewest=fewest / 2**30,
                nodes=cluster.nodes_max,
                min_nodes=cluster.nodes_min,
            )
        )
    return facts


def usable_nodes(job: TrainingJob, cluster: ClusterSpec) -> tuple[int, ...]:
    """Numbers of nodes that can train together, if it is known and not all can; with mpirun all that there are take part."""
    if job.launcher != "torchrun" or cluster.nodes_min == cluster.nodes_max:
        return ()
    known = [facts.usable_nodes for facts in job_facts(job, cluster, memory_gib=0.0) if isinstance(facts, JobFacts)]
    every = cluster.nodes_max - cluster.nodes_min + 1
    return known[0] if known and len(known[0]) != every else ()


def launcher_facts(job: TrainingJob, image: NodeImage) -> LauncherFacts:
    """The facts of how a job is launched."""
    return LauncherFacts(
        launcher=job.launcher,
        sets_path="PATH" in job.environment,
        ami=None if Token.is_unresolved(image.ami) else image.ami,
        is_deep_learning=image.is_deep_learning,
    )


def binding_facts(job: TrainingJob, cluster: ClusterSpec) -> BindingFacts:
    """The facts of how ranks are bound to processors."""
    return BindingFacts(
        numa=job.numa,
        instance_type=cluster.instance_type,
        gpus=cluster.accelerators_per_node if cluster.accelerator == "nvidia" else 0,
        processes_per_node=cluster.processes_per_node,
    )


def software_facts(job: TrainingJob, image: NodeImage, *, region: str | None, isolated: bool) -> SoftwareFacts:
    """The facts of what a job runs with."""
    return SoftwareFacts(
        container=job.container,
        requirements=job.requirements,
        conda=job.conda,
        region=region,
        isolated=isolated,
        ami=None if Token.is_unresolved(image.ami) else image.ami,
        is_deep_learning=image.is_deep_learning,
    )
