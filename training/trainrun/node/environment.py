"""The environment of the ranks: one function of what is known, so that it can be read and tested.

What it leaves unset matters as much. The libfabric and NCCL variables of older guides (FI_PROVIDER,
FI_EFA_USE_DEVICE_RDMA, NCCL_PROTO, NCCL_ALGO, NCCL_NET_PLUGIN, NCCL_TUNER_PLUGIN, NCCL_BUFFSIZE, ...) are set
right per instance type by the aws-ofi-nccl plugin itself, and wrong values there cost speed without a word
(aws-ofi-nccl: doc/efa-env-var.md, src/platform-aws.cpp). No interface is named by a literal: EC2 hosts call
them ens5, enp71s0, eth0 (field case NET-10).

What is set for some types and versions only has its reason beside it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainrun.node.checks.versions import older
from trainrun.node.places import Places
from trainrun.spec import ClusterSpec, RunSpec

EFA_LIBRARY_FOLDERS = (
    Path("/opt/amazon/efa/lib"),
    Path("/opt/amazon/efa/lib64"),
    Path("/opt/amazon/ofi-nccl/lib"),
    Path("/opt/amazon/ofi-nccl/lib64"),
    Path("/opt/amazon/aws-ofi-nccl/lib"),
)
"""Where EFA installers and images put libfabric and NCCL's plugin for it. Without the plugin NCCL takes TCP, silently."""


def rank_environment(
    spec: RunSpec,
    *,
    places: Places,
    base: Mapping[str, str],
    interface: str,
    processors: int,
    libraries: Sequence[Path] = (),
    installer: str = "",
) -> dict[str, str]:
    """The whole environment of torchrun and its ranks.

    Args:
        spec: the document.
        places: where things are on this node.
        base: the agent's own environment, which the ranks inherit.
        interface: name of the network interface that holds the node's address; "" when unknown.
        processors: processors that this node may use.
        libraries: folders of libfabric and NCCL's plugin that exist on this node.
        installer: version of the EFA installer of this node's software; "" when unknown.
    """
    environment = dict(base)
    environment["AWS_REGION"] = environment["AWS_DEFAULT_REGION"] = spec.region
    # Threads of one rank: its share of the processors. torchrun's own default is 1, which idles a CPU node.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, processors // spec.cluster.processes_per_node)))
    if interface:
        environment["GLOO_SOCKET_IFNAME"] = interface  # gloo would look its own host name up, which may not resolve
    if spec.cluster.accelerator == "nvidia":
        environment["NCCL_SOCKET_IFNAME"] = "^docker,lo,veth"  # an exclusion; it is for bootstrap only
    if spec.cluster.efa_interfaces and libraries:
        environment["LD_LIBRARY_PATH"] = _path([*map(str, libraries), base.get("LD_LIBRARY_PATH", "")])

    environment |= _efa_variables(spec.cluster, installer=installer)
    environment.update(spec.job.environment)

    environment["PYTHONPATH"] = _path([str(places.payload), str(places.project), environment.get("PYTHONPATH", "")])
    environment["TRAINRUN_SPEC"] = str(places.spec)
    environment["TRAINRUN_STATE"] = str(places.state)
    # With the shared store a newcomer hangs 60 s on the store of a round that is over (torch 2.13, measured).
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return environment


def _efa_variables(cluster: ClusterSpec, *, installer: str) -> dict[str, str]:
    """What libfabric has to be told on some types, or by some versions of its installer."""
    if not cluster.efa_interfaces:
        return {}
    if cluster.accelerator == "neuron":
        # Neuron's collectives have no plugin that would set these, and fail without EFA (Neuron documentation, trn1 set-up).
        return {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
    found = {}
    if cluster.instance_type == "p5.4xlarge":
        # One GPU without peer-to-peer to its EFA device (EC2 User Guide, "Get started with EFA and NCCL").
        found["FI_HMEM_DISABLE_P2P"] = "1"
    if cluster.accelerator == "nvidia" and installer and older(installer, "1.29.1"):
        # NCCL 2.19 and later fail with a libfabric that wants CUDA's memory operations to be synchronous (aws-ofi-nccl#584).
        found["FI_EFA_SET_CUDA_SYNC_MEMOPS"] = "0"
    return found


def processors_here() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _path(parts: Sequence[str]) -> str:
    """A search path of the distinct, non-empty parts, in order."""
    entries = [entry for part in parts for entry in part.split(os.pathsep) if entry]
    return os.pathsep.join(dict.fromkeys(entries))
