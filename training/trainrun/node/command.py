"""What a rank runs, and the torchrun command of one launch."""

from __future__ import annotations

from trainrun.node.meet import Meeting
from trainrun.node.metadata import Identity
from trainrun.node.places import Places
from trainrun.spec import JobSpec, RunSpec

FIRST_LAST_CALL_SECONDS = 30
"""How long a first launch waits for nodes beyond nodes_min: instances boot at different speeds."""
LAST_CALL_SECONDS = 3
"""The same after a loss, when all that are left come at once. Who misses it is let in later, by a restart of the ranks."""
KEEP_ALIVE_SECONDS = 1


def torchrun_command(
    spec: RunSpec, *, python: str, places: Places, identity: Identity, meeting: Meeting, first: bool, numa: str = ""
) -> list[str]:
    """The command line.

    torchrun restarts no ranks itself (--max-restarts=0): it ends at the first failure, and the agents meet anew and
    launch again. So there is one way of recovery, whether a rank, a node or the rendezvous host was lost, and one
    budget. It does let newcomers in: that restarts the ranks, and is no failure.

    Args:
        spec: the document.
        python: the job's Python.
        places: where things are on this node.
        identity: this node.
        meeting: what the nodes agreed on.
        first: whether this is the first launch since the agent started.
        numa: how torchrun is to bind ranks to processors; "" leaves them unbound (`numa.binding`).
    """
    cluster, claim = spec.cluster, meeting.claim
    fewest, most = (claim.nodes, claim.nodes) if claim.nodes else (cluster.nodes_min, cluster.nodes_max)
    waits_for_more = first and meeting.expected > fewest
    rendezvous = {
        "is_host": int(claim.node == identity.node),
        "join_timeout": spec.timeouts.rendezvous,
        "last_call_timeout": FIRST_LAST_CALL_SECONDS if waits_for_more else LAST_CALL_SECONDS,
        "keep_alive_interval": KEEP_ALIVE_SECONDS,
        "keep_alive_max_attempt": max(1, spec.timeouts.peer_lost // KEEP_ALIVE_SECONDS),
    }
    job = spec.job
    return [
        *(python, "-m", "torch.distributed.run"),
        f"--nnodes={fewest}:{most}",
        f"--nproc-per-node={cluster.processes_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={claim.address}:{claim.port}",
        f"--rdzv-id=generation-{claim.generation}",
        "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in rendezvous.items()),
        "--max-restarts=0",
        f"--local-addr={identity.address}",
        f"--shutdown-timeout={spec.timeouts.stop_grace}",
        f"--log-dir={places.rank_logs}",
        "--redirects=3",
        *([f"--numa-binding={numa}"] if numa else []),
        *(["--no-python"] if job.is_program else [] if job.is_script else ["-m"]),
        "--",  # or argparse would take an argument of the job, such as --log, for a short form of torchrun's own
        entry_point(job, places=places),
        *job.arguments,
    ]


def rank_command(job: JobSpec, *, python: str, places: Places) -> list[str]:
    """What one rank runs, where nothing like torchrun stands between."""
    interpreter = [] if job.is_program else [python] if job.is_script else [python, "-m"]
    return [*interpreter, entry_point(job, places=places), *job.arguments]


def entry_point(job: JobSpec, *, places: Places) -> str:
    """The module's name, or the whole path of the script or program: below the project, unless it is absolute."""
    return str(places.project / job.entry_point) if job.is_script or job.is_program else job.entry_point
