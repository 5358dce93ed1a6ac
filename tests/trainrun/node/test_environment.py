"""The environment and the command of the ranks."""

from __future__ import annotations

import dataclasses
import socket
import sys
from pathlib import Path

import pytest

from trainrun.config import ConfigError
from trainrun.node.claims import Claim
from trainrun.node.command import torchrun_command
from trainrun.node.environment import rank_environment
from trainrun.node.interface import interface_of
from trainrun.node.meet import Meeting
from trainrun.node.metadata import Identity
from trainrun.node.places import Places
from trainrun.spec import ClusterSpec, JobSpec, RunSpec, StorageSpec, TimeoutSpec

PLACES = Places(root=Path("/"))
NEVER_SET = ("NCCL_PROTO", "NCCL_ALGO", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_BUFFSIZE", "NCCL_DEBUG", "FI_PROVIDER")


def spec_of(*, environment=None, entry_point="trainrun.pretrain", **cluster):
    defaults = {"name": "Stack/Cluster", "instance_type": "c7i.large", "nodes_min": 1, "nodes_desired": 2, "nodes_max": 4}
    return RunSpec(
        run="a run/with a slash",
        region="eu-north-1",
        cluster=ClusterSpec(**{**defaults, **cluster}),
        job=JobSpec(entry_point=entry_point, arguments=("--config", "my file.yaml"), environment=environment or {}),
        storage=StorageSpec(location="s3://bucket/prefix"),
        timeouts=TimeoutSpec(rendezvous=300, peer_lost=10, stop_grace=90),
    )


P5 = {"instance_type": "p5.48xlarge", "accelerator": "nvidia", "accelerators_per_node": 8, "processes_per_node": 8}


def environment_of(spec, *, base=None, **known):
    known = {"interface": "ens5", "processors": 8, **known}
    return rank_environment(spec, places=PLACES, base=base or {}, **known)


def test_what_a_cpu_node_gets_is_exactly_this():
    assert environment_of(spec_of(), base={"PATH": "/bin", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}) == {
        "PATH": "/bin",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_REGION": "eu-north-1",
        "AWS_DEFAULT_REGION": "eu-north-1",
        "OMP_NUM_THREADS": "8",
        "GLOO_SOCKET_IFNAME": "ens5",
        "PYTHONPATH": "/opt/traincluster/payload:/opt/traincluster/payload/project",
        "TRAINRUN_SPEC": "/etc/traincluster/run.json",
        "TRAINRUN_STATE": "/var/lib/traincluster",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def test_what_the_efa_plugin_sets_itself_is_left_alone():
    environment = environment_of(spec_of(**P5, efa_interfaces=32), processors=192)
    assert not [name for name in environment if name in NEVER_SET or name.startswith(("FI_", "RDMAV_"))]
    assert environment["OMP_NUM_THREADS"] == "24"


TRN1 = {"instance_type": "trn1.32xlarge", "accelerator": "neuron", "accelerators_per_node": 16, "processes_per_node": 32}


@pytest.mark.parametrize(
    ("cluster", "installer", "expected"),
    [
        (P5, "1.47.0", {}),
        (P5, "1.29.1", {}),
        (P5, "1.29.0", {"FI_EFA_SET_CUDA_SYNC_MEMOPS": "0"}),
        (P5, "1.9.5", {"FI_EFA_SET_CUDA_SYNC_MEMOPS": "0"}),
        ({**P5, "instance_type": "p5.4xlarge"}, "1.47.0", {"FI_HMEM_DISABLE_P2P": "1"}),
        (TRN1, "1.47.0", {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}),
    ],
)
def test_what_libfabric_is_told_depends_on_type_and_version(cluster, installer, expected):
    found = environment_of(spec_of(**cluster, efa_interfaces=8), installer=installer)
    assert {name: value for name, value in found.items() if name.startswith("FI_")} == expected
    without = environment_of(spec_of(**cluster), installer=installer)
    assert not [name for name in without if name.startswith("FI_")]


def test_net_10_no_interface_is_named_by_a_literal():
    assert environment_of(spec_of(**P5))["NCCL_SOCKET_IFNAME"] == "^docker,lo,veth"
    assert environment_of(spec_of(), interface="enp71s0")["GLOO_SOCKET_IFNAME"] == "enp71s0"
    assert "GLOO_SOCKET_IFNAME" not in environment_of(spec_of(), interface="")
    sources = [path.read_text() for path in Path(rank_environment.__code__.co_filename).parent.glob("*.py")]
    assert not [text for text in sources if '"eth0"' in text or '"ens5"' in text]


def test_the_efa_libraries_are_found_before_others_and_only_with_efa():
    libraries = [Path("/opt/amazon/efa/lib"), Path("/opt/amazon/ofi-nccl/lib")]
    base = {"LD_LIBRARY_PATH": "/usr/local/cuda/lib:/opt/amazon/efa/lib"}
    with_efa = environment_of(spec_of(**P5, efa_interfaces=32), base=base, libraries=libraries)
    assert with_efa["LD_LIBRARY_PATH"] == "/opt/amazon/efa/lib:/opt/amazon/ofi-nccl/lib:/usr/local/cuda/lib"
    assert environment_of(spec_of(**P5), base=base, libraries=libraries)["LD_LIBRARY_PATH"] == base["LD_LIBRARY_PATH"]


def test_the_job_has_the_last_word_where_the_agent_has_none():
    environment = environment_of(spec_of(environment={"OMP_NUM_THREADS": "3", "PYTHONPATH": "/mine", "NCCL_DEBUG": "INFO"}))
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["PYTHONPATH"] == "/opt/traincluster/payload:/opt/traincluster/payload/project:/mine"


def test_a_variable_of_the_agent_in_the_job_is_an_error():
    with pytest.raises(ConfigError, match="environment sets TRAINRUN_STATE, which the node agent sets itself"):
        spec_of(environment={"TRAINRUN_STATE": "/tmp"})


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel is not asked, and the interface stays unknown")
def test_the_interface_of_an_address_is_asked_of_the_kernel():
    names = {name for _, name in socket.if_nameindex()}
    assert interface_of("127.0.0.1") in names
    assert interface_of("127.0.0.9") == interface_of("127.0.0.1")
    assert interface_of("192.0.2.1") == ""


def command_of(spec, *, node="i-host", expected=2, first=True, **more):
    claim = Claim(generation=3, node="i-host", address="10.0.0.7", port=29400, beacon=40000)
    return torchrun_command(
        spec,
        python="/opt/pytorch/bin/python",
        places=PLACES,
        identity=Identity(node=node, address="10.0.0.8"),
        meeting=Meeting(claim=claim, in_service=2, expected=expected),
        first=first,
        **more,
    )


def rendezvous_of(command):
    (text,) = [argument.removeprefix("--rdzv-conf=") for argument in command if argument.startswith("--rdzv-conf=")]
    return dict(pair.split("=") for pair in text.split(","))


def test_the_command():
    command = command_of(spec_of(**P5))
    assert command[:3] == ["/opt/pytorch/bin/python", "-m", "torch.distributed.run"]
    for argument in (
        "--nnodes=1:4",
        "--nproc-per-node=8",
        "--rdzv-endpoint=10.0.0.7:29400",
        "--rdzv-id=generation-3",
        "--max-restarts=0",
        "--local-addr=10.0.0.8",
        "--shutdown-timeout=90",
    ):
        assert argument in command
    assert command[-5:] == ["-m", "--", "trainrun.pretrain", "--config", "my file.yaml"]


def test_ranks_are_bound_only_where_that_was_found_possible():
    assert not [argument for argument in command_of(spec_of(**P5)) if "numa" in argument]
    command = command_of(spec_of(**P5), numa="node")
    assert command.index("--numa-binding=node") < command.index("--")


def test_a_script_is_taken_from_the_project():
    assert command_of(spec_of(entry_point="train.py"))[-3:] == [
        "/opt/traincluster/payload/project/train.py",
        "--config",
        "my file.yaml",
    ]


def test_torchrun_leaves_the_arguments_of_the_job_alone():
    """--log and --run are short for more than one of torchrun's own options, which would end it at once."""
    from torch.distributed.run import parse_args

    arguments = ("--log=x", "--run", "r", "--node", "--max-restarts=3")
    spec = dataclasses.replace(spec_of(), job=JobSpec(entry_point="trainrun.pretrain", arguments=arguments))
    parsed = parse_args(command_of(spec)[3:])
    assert parsed.module and parsed.training_script == "trainrun.pretrain"
    assert parsed.training_script_args == list(arguments)
    assert parsed.max_restarts == 0


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
def test_what_no_program_can_be_given_is_refused(text):
    with pytest.raises(ConfigError, match=r"arguments\[0\] holds a NUL"):
        JobSpec(entry_point="train.py", arguments=(text,))
    with pytest.raises(ConfigError, match=r"environment\.A holds a NUL"):
        JobSpec(entry_point="train.py", environment={"A": text})


def test_exactly_the_claimed_node_hosts_the_rendezvous():
    assert rendezvous_of(command_of(spec_of(), node="i-host"))["is_host"] == "1"
    assert rendezvous_of(command_of(spec_of(), node="i-other"))["is_host"] == "0"


def test_a_first_launch_waits_longer_for_the_rest_where_there_is_a_rest():
    assert rendezvous_of(command_of(spec_of()))["last_call_timeout"] == "30"
    assert rendezvous_of(command_of(spec_of(), first=False))["last_call_timeout"] == "3"
    assert rendezvous_of(command_of(spec_of(), expected=1))["last_call_timeout"] == "3"


def test_silence_of_peer_lost_seconds_ends_a_peer():
    rendezvous = rendezvous_of(command_of(spec_of()))
    assert int(rendezvous["keep_alive_interval"]) * int(rendezvous["keep_alive_max_attempt"]) == 10
    assert rendezvous["join_timeout"] == "300"
