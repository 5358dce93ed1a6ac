"""Launching by mpirun: what this node's part of one launch is made of."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence

from trainrun.node.command import rank_command
from trainrun.node.interface import network_of
from trainrun.node.launch import working_directory
from trainrun.node.meet import Meeting
from trainrun.node.metadata import Identity
from trainrun.node.mpi_board import Board, Ticket
from trainrun.node.mpi_command import default_variables, own_variables
from trainrun.node.mpi_launch import MpiHost, MpiLaunch, MpiMember, MpiNode
from trainrun.node.mpi_program import find_mpirun, with_home
from trainrun.node.mpi_rank import VARIABLE, RankOrder
from trainrun.node.mpi_ranks import MpiRanks
from trainrun.node.places import Places
from trainrun.spec import RunSpec
from trainrun.store import Store

FIRST_LAST_CALL_SECONDS = 30.0
"""How long a first launch waits for one more node, when more are expected."""
LAST_CALL_SECONDS = 10.0
"""The same after a loss. A node that misses it costs another start of all ranks."""


def mpi_launch(
    spec: RunSpec,
    *,
    python: str,
    places: Places,
    identity: Identity,
    meeting: Meeting,
    first: bool,
    beacon: int,
    store: Store,
    environment: Callable[[Mapping[str, str]], dict[str, str]],
    processors: Sequence[Sequence[int]] = (),
) -> MpiLaunch:
    """This node's part of a launch.

    Every node gives its own ranks their environment: it is that of mpirun, or of its daemon, which ranks inherit. So
    nothing has to be forwarded (mpirun -x), and what differs among nodes, such as an interface's name, may differ.

    Args:
        spec: the document.
        python: the job's Python.
        places: where things are on this node.
        identity: this node.
        meeting: what the nodes agreed on. The rendezvous' host runs mpirun, and rank 0.
        first: whether this is the first launch since the agent started.
        beacon: port on which this node's agent shows that it is alive.
        store: the run's folder.
        environment: what ranks get over a given environment (`rank_environment`).
        processors: those that each rank of this node is bound to; none means all.

    Raises:
        StepFailed: there is no Open MPI.
    """
    claim, job, cluster = meeting.claim, spec.job, spec.cluster
    ticket = Ticket.new(node=identity.node, address=identity.address, beacon=beacon)
    folder = places.rank_logs / f"mpirun-{ticket.key}" / "attempt_0"
    folder.mkdir(parents=True)
    order = RankOrder(
        command=rank_command(job, python=python, places=places),
        working_directory=str(working_directory(places)),
        folder=str(folder),
        processors=[list(one) for one in processors],
    )
    shutil.rmtree(places.mpi, ignore_errors=True)  # of a launch before this one
    places.mpi.mkdir()
    defaults = default_variables(job.environment, network=network_of(identity.address), efa=bool(cluster.efa_interfaces))
    node = MpiNode(
        mpirun=find_mpirun(job, python=python, environment=os.environ),
        environment={
            **environment({**with_home(os.environ), **defaults}),
            **own_variables(places.mpi),
            VARIABLE: order.to_text(),
            "MASTER_ADDR": claim.address,
            "MASTER_PORT": str(claim.port),
        },
        places=places,
        ranks=MpiRanks(folder=folder, count=cluster.processes_per_node),
        board=Board(store=store, generation=claim.generation),
        timeouts=spec.timeouts,
    )
    if claim.node != identity.node:
        return MpiMember(node, ticket=ticket)
    return MpiHost(
        node,
        cluster=cluster,
        expected=meeting.expected,
        last_call=FIRST_LAST_CALL_SECONDS if first else LAST_CALL_SECONDS,
        python=sys.executable,
    )
