"""The command, the host file and the variables of one launch of mpirun, and what it makes of the daemons' commands.

Settings are given as variables, because Open MPI 4 reads OMPI_MCA_*, PRRTE, which is Open MPI 5's launcher, reads
PRTE_MCA_*, and neither minds the other's.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainrun.node.mpi_program import DAEMONS, Mpirun
from trainrun.node.outcome import StepFailed

REMOTE_SHELL = """\
#!/bin/sh
# mpirun runs this in ssh's place, once for each other node: HOST COMMAND... The agent hands the command on.
command="${0%/*}/commands/$1"
shift
printf '%s' "$*" >"$command.new" && mv "$command.new" "$command"
"""


def mpirun_command(mpirun: Mpirun, *, python: str, host_file: Path, ranks: int) -> list[str]:
    """The command line.

    Ranks are bound to no processor (mpirun would bind each to one, with all its threads), and they are numbered node by
    node, as torchrun numbers them.

    Args:
        mpirun: what runs it.
        python: the agent's Python, which runs the program that becomes each rank.
        host_file: the nodes, this one first.
        ranks: how many there are in all.
    """
    return [
        str(mpirun.program),
        "--allow-run-as-root",
        "--leave-session-attached",  # daemons stay children of their nodes' agents
        *("--hostfile", str(host_file)),
        *("-np", str(ranks)),
        *("--map-by", "slot"),
        *("--bind-to", "none"),
        *(python, "-m", "trainrun.node.mpi_rank"),
    ]


def host_file(addresses: Sequence[str], *, slots: int) -> str:
    """The nodes besides this one, which comes first and is localhost: Open MPI knows itself by no other name for certain."""
    return "".join(f"{address} slots={slots}\n" for address in ("localhost", *addresses))


def default_variables(job: Mapping[str, str], *, network: str, efa: bool) -> dict[str, str]:
    """What Open MPI is told unless the job says otherwise.

    Args:
        job: the job's own environment.
        network: the network that the nodes share. Open MPI would try every address of a node, docker0's too, which is
            the same on all of them.
        efa: whether the nodes have EFA. NCCL's traffic takes it by its own plugin; that of MPI itself takes TCP unless
            the job asks for more: AWS's guide to NCCL on EFA does the same ("pml ^cm").
    """
    found = {"OMPI_MCA_pml": "^cm"} if efa else {}
    for name in ("OMPI_MCA_oob_tcp_if", "PRTE_MCA_prte_if", "OMPI_MCA_btl_tcp_if") if network else ():
        if f"{name}_exclude" not in job:  # Open MPI takes one of the two
            found[f"{name}_include"] = network
    return found


def own_variables(folder: Path) -> dict[str, str]:
    """What makes mpirun start its daemons through the agents, and keep its own files in ``folder``."""
    remote_shell = f"/bin/sh {folder / 'remote-shell'}"
    return {
        "OMPI_MCA_plm": "rsh",
        "OMPI_MCA_plm_rsh_agent": remote_shell,
        "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
        "OMPI_MCA_orte_tmpdir_base": str(folder),
        "PRTE_MCA_plm": "ssh",
        "PRTE_MCA_plm_ssh_agent": remote_shell,
        "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
        "PRTE_MCA_prte_tmpdir_base": str(folder),
    }


@dataclass(frozen=True, kw_only=True)
class DaemonCommand:
    """What a node needs to know to start the daemon of its own Open MPI."""

    arguments: list[str]
    variables: dict[str, str]
    """Where Open MPI lies, for one that does not lie where it was built for; no other variables."""


def daemon_command(command: str) -> DaemonCommand:
    """The daemon in the shell command by which mpirun would start it.

    Raises:
        StepFailed: the command starts no daemon of Open MPI.
    """
    words = shlex.split(command)
    starts = [number for number, word in enumerate(words) if Path(word.rpartition(";")[2]).name in DAEMONS]
    if not starts:
        raise StepFailed(f"mpirun wants other nodes to run {command!r}, in which there is neither {' nor '.join(DAEMONS)}.")
    before, arguments = words[: starts[0] + 1], words[starts[0] + 1 :]
    assignments = dict(part.split("=", 1) for word in before for part in word.split(";") if "=" in part)
    return DaemonCommand(arguments=arguments, variables=only_prefixes(assignments))


def only_prefixes(variables: Mapping[str, str]) -> dict[str, str]:
    """Those variables that say where Open MPI and its parts lie."""
    return {name: variables[name] for name in ("OPAL_PREFIX", "PMIX_PREFIX", "PRTE_PREFIX") if name in variables}
