"""Where Open MPI is found, what it is told, and what its daemons are told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainrun.config import ConfigError
from trainrun.node.check import check_launcher, needs_torch
from trainrun.node.claims import Claim
from trainrun.node.command import rank_command, torchrun_command
from trainrun.node.interface import interface_of, network_of
from trainrun.node.meet import Meeting
from trainrun.node.metadata import Identity
from trainrun.node.mpi_command import (
    REMOTE_SHELL,
    daemon_command,
    default_variables,
    host_file,
    mpirun_command,
    own_variables,
)
from trainrun.node.mpi_program import EFA_FOLDER, Mpirun, find_mpirun
from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.spec import OWNED_VARIABLES, ClusterSpec, JobSpec, RunSpec, StorageSpec

PLACES = Places(root=Path("/"))

OPEN_MPI_4 = (
    "  OPAL_PREFIX=/mpi ; export OPAL_PREFIX;    PATH=/mpi/bin:$PATH ; export PATH ; "
    "LD_LIBRARY_PATH=/mpi/lib:$LD_LIBRARY_PATH ; export LD_LIBRARY_PATH ; /mpi/bin/orted "
    '-mca orte_leave_session_attached "1" -mca ess "env" -mca ess_base_vpid 1 '
    '-mca orte_hnp_uri "1170604032.0;tcp://10.0.0.7:53253" -mca pmix "^s1,s2,cray,isolated"'
)
OPEN_MPI_5 = (
    "PRTE_PREFIX=/mpi;export PRTE_PREFIX;PMIX_PREFIX=/mpi;export PMIX_PREFIX;"
    "LD_LIBRARY_PATH=/mpi/lib:$LD_LIBRARY_PATH;export LD_LIBRARY_PATH;/mpi/bin/prted "
    '--leave-session-attached --prtemca ess "env" --prtemca prte_hnp_uri "prterun-vm-1@0.0;tcp://10.0.0.7:58769:64,24"'
)


def an_mpirun(folder, *, says="mpirun (Open MPI) 4.1.7", daemon="orted"):
    folder.mkdir(parents=True)
    for name, text in (("mpirun", says), (daemon, "")):
        (folder / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (folder / name).chmod(0o755)
    return folder / "mpirun"


def test_the_jobs_path_is_looked_at_before_its_python_and_that_before_the_agents_path(tmp_path):
    programs = {name: an_mpirun(tmp_path / name) for name in ("job", "python", "agent")}
    job = JobSpec(entry_point="train.py", launcher="mpirun", environment={"PATH": str(tmp_path / "job")})
    environment = {"PATH": str(tmp_path / "agent")}
    python = str(tmp_path / "python/python3")
    assert find_mpirun(job, python=python, environment=environment).program == programs["job"]
    programs["job"].unlink()
    assert find_mpirun(job, python=python, environment=environment).program == programs["python"]
    programs["python"].unlink()
    found = find_mpirun(job, python=python, environment=environment)
    assert (found.program, found.version, found.daemon) == (programs["agent"], "4.1.7", tmp_path / "agent/orted")


def test_a_node_without_open_mpi_says_where_it_looked_and_how_to_get_it(tmp_path):
    an_mpirun(tmp_path / "mpich", says="HYDRA build details: Version: 4.2")
    an_mpirun(tmp_path / "half", daemon="unrelated")
    job = JobSpec(entry_point="train.py", launcher="mpirun", environment={"PATH": f"{tmp_path}/mpich:{tmp_path}/half"})
    with pytest.raises(StepFailed) as caught:
        find_mpirun(job, python="/nonexistent/python", environment={"PATH": f"{tmp_path}/agent"})
    message = str(caught.value)
    assert f"{tmp_path}/mpich (its mpirun will not do: asked for its version it says 'HYDRA build details" in message
    assert f"{tmp_path}/half (its mpirun will not do: it has neither prted nor orted beside it)" in message
    assert f"/nonexistent, {EFA_FOLDER}, {tmp_path}/agent" in message
    assert "AWS's EFA installer puts it there" in message


def test_the_check_looks_for_mpirun_only_where_it_is_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_launcher(JobSpec(entry_point="train.py"), python="/nonexistent/python") == "torchrun"
    with pytest.raises(StepFailed, match="there is no Open MPI 4 or 5 here"):
        check_launcher(JobSpec(entry_point="train.py", launcher="mpirun"), python="/nonexistent/python")
    program = an_mpirun(tmp_path / "bin", says="mpirun (Open MPI) 5.0.11", daemon="prted")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    job = JobSpec(entry_point="/bin/true", launcher="mpirun")
    assert check_launcher(job, python="/nonexistent/python") == f"Open MPI 5.0.11 ({program})"


def test_an_mpirun_without_a_home_is_given_one(tmp_path, monkeypatch):
    """Under systemd the agent has none, and then Open MPI does not start."""
    program = an_mpirun(tmp_path / "bin")
    program.write_text('#!/bin/sh\n[ -d "$HOME" ] && echo "mpirun (Open MPI) 4.1.7"\n')
    monkeypatch.delenv("HOME")
    job = JobSpec(entry_point="train.py", launcher="mpirun")
    assert find_mpirun(job, python=str(tmp_path / "bin/python"), environment={}).program == program


def test_only_programs_under_mpirun_can_do_without_torch():
    jobs = [JobSpec(entry_point=e, launcher=launcher) for launcher in ("torchrun", "mpirun") for e in ("a.py", "./a")]
    assert [needs_torch(job) for job in jobs] == [True, True, True, False]


@pytest.mark.parametrize(
    ("command", "prefixes"),
    [
        (OPEN_MPI_4, ["OPAL_PREFIX"]),
        (OPEN_MPI_4.partition("; /mpi/bin/")[2], []),
        (OPEN_MPI_5, ["PMIX_PREFIX", "PRTE_PREFIX"]),
    ],
)
def test_of_a_daemons_command_only_the_arguments_and_its_place_are_taken(command, prefixes):
    daemon = daemon_command(command)
    assert daemon.arguments[0] in ("-mca", "--leave-session-attached")
    assert [text for text in daemon.arguments if "hnp_uri" not in text and "tcp://10.0.0.7" in text]
    assert not [text for text in daemon.arguments if '"' in text or "export" in text or "/mpi" in text]
    assert daemon.variables == dict.fromkeys(prefixes, "/mpi")


@pytest.mark.parametrize("command", ["", "rm -rf /", "PATH=/prted/bin ; reboot", "echo orted.sh"])
def test_a_command_that_starts_no_daemon_is_refused(command):
    with pytest.raises(StepFailed, match="in which there is neither prted nor orted"):
        daemon_command(command)


def test_what_mpirun_takes_for_ssh_hands_the_command_on(tmp_path):
    (tmp_path / "commands").mkdir()
    (tmp_path / "remote-shell").write_text(REMOTE_SHELL)
    subprocess.run(["/bin/sh", str(tmp_path / "remote-shell"), "10.0.0.8", OPEN_MPI_5, "more"], check=True)
    assert [path.name for path in (tmp_path / "commands").iterdir()] == ["10.0.0.8"]
    assert (tmp_path / "commands/10.0.0.8").read_text() == f"{OPEN_MPI_5} more"


def test_the_command_and_the_hosts():
    mpirun = Mpirun(program=Path("/opt/amazon/openmpi/bin/mpirun"), version="4.1.7")
    command = mpirun_command(mpirun, python="/opt/pytorch/bin/python", host_file=Path("/hosts"), ranks=16)
    text = " ".join(command)
    assert text.startswith("/opt/amazon/openmpi/bin/mpirun --allow-run-as-root ")
    assert "--hostfile /hosts -np 16 --map-by slot --bind-to none" in text
    assert command[-3:] == ["/opt/pytorch/bin/python", "-m", "trainrun.node.mpi_rank"]
    assert host_file(["10.0.0.8"], slots=8) == "localhost slots=8\n10.0.0.8 slots=8\n"


def test_open_mpi_is_kept_to_the_nodes_own_network_unless_the_job_knows_better():
    variables = default_variables({}, network="10.0.16.0/20", efa=True)
    assert variables == {
        "OMPI_MCA_pml": "^cm",
        "OMPI_MCA_oob_tcp_if_include": "10.0.16.0/20",
        "PRTE_MCA_prte_if_include": "10.0.16.0/20",
        "OMPI_MCA_btl_tcp_if_include": "10.0.16.0/20",
    }
    excluding = default_variables({"OMPI_MCA_btl_tcp_if_exclude": "lo,docker0"}, network="10.0.16.0/20", efa=False)
    assert set(excluding) == {"OMPI_MCA_oob_tcp_if_include", "PRTE_MCA_prte_if_include"}
    assert default_variables({}, network="", efa=False) == {}


def test_a_job_may_not_set_what_the_launcher_sets():
    own = own_variables(Path("/var/lib/traincluster/mpi"))
    assert set(own) <= set(OWNED_VARIABLES)
    for name in (*own, "RANK", "MASTER_ADDR"):
        with pytest.raises(ConfigError, match=f"environment sets {name}, which the node agent sets itself"):
            JobSpec(entry_point="train.py", environment={name: "x"})


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel is not asked, and the network stays unknown")
def test_the_network_of_an_address_is_asked_of_the_kernel(monkeypatch):
    assert network_of("127.0.0.9") == ""
    assert network_of("192.0.2.77") == "" or interface_of("192.0.2.77")
    monkeypatch.setattr("trainrun.node.interface.interface_of", lambda address: "ens5")
    monkeypatch.setattr("trainrun.node.interface._ask", lambda name, question: "255.255.240.0")
    assert network_of("10.0.17.3") == "10.0.16.0/20"


@pytest.mark.parametrize(
    ("entry_point", "alone", "under_torchrun"),
    [
        ("train.py", ["/python", "PROJECT/train.py"], ["--", "PROJECT/train.py"]),
        ("/opt/train.py", ["/python", "/opt/train.py"], ["--", "/opt/train.py"]),
        ("package.train", ["/python", "-m", "package.train"], ["-m", "--", "package.train"]),
        ("./run.sh", ["PROJECT/run.sh"], ["--no-python", "--", "PROJECT/run.sh"]),
        ("/usr/bin/all_reduce_perf", ["/usr/bin/all_reduce_perf"], ["--no-python", "--", "/usr/bin/all_reduce_perf"]),
    ],
)
def test_what_a_rank_runs(entry_point, alone, under_torchrun):
    job = JobSpec(entry_point=entry_point, arguments=("-g", "1"))
    project = str(PLACES.project)
    assert rank_command(job, python="/python", places=PLACES) == [*(w.replace("PROJECT", project) for w in alone), "-g", "1"]
    spec = RunSpec(
        run="r",
        region="us-east-1",
        cluster=ClusterSpec(name="c", instance_type="c7i.large", nodes_min=1, nodes_desired=1, nodes_max=1),
        job=job,
        storage=StorageSpec(location="s3://bucket"),
    )
    claim = Claim(generation=1, node="i-1", address="10.0.0.7", port=29400, beacon=1)
    command = torchrun_command(
        spec,
        python="/python",
        places=PLACES,
        identity=Identity(node="i-1", address="10.0.0.7"),
        meeting=Meeting(claim=claim, in_service=1, expected=1),
        first=True,
    )
    words = [*(w.replace("PROJECT", project) for w in under_torchrun), "-g", "1"]
    assert command[-len(words) :] == words
    assert command[-len(words) - 1] == "--redirects=3"
