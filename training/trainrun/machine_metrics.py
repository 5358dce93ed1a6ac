"""Names of the metrics that the CloudWatch agent of each node sends, for whoever sends them and whoever builds alarms on them.

Standard library only: the CDK side reads them through `trainrun.spec`. Sources: the agent's guide (metrics-collected-by-
CloudWatch-agent, CloudWatch-Agent-NVIDIA-GPU, CloudWatch-Agent-EFA) and its schema.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NAMESPACE = "Traincluster"
"""CloudWatch namespace unless the settings name another."""

GROUP_DIMENSION, INSTANCE_DIMENSION = "AutoScalingGroupName", "InstanceId"
"""Each metric is there twice, by either of these dimensions alone: of the whole group, and of one node. Not by device: a metric
costs by the number of dimensions' values, and eight GPUs would cost eight times as much."""

INTERVAL_SECONDS = 60


@dataclass(frozen=True)
class Section:
    """One section of the agent's configuration."""

    name: str
    measurements: tuple[str, ...]
    prefix: str
    """Of the names in CloudWatch."""
    resources: tuple[str, ...] = ()
    """What is measured, where there are several; () leaves it to the agent."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names in CloudWatch."""
        return tuple(f"{self.prefix}{measurement}" for measurement in self.measurements)


MACHINE = (
    Section("cpu", ("usage_active", "usage_iowait"), "cpu_"),
    Section("mem", ("used_percent", "available"), "mem_"),
    Section("disk", ("used_percent", "free"), "disk_", ("*",)),
    Section("diskio", ("read_bytes", "write_bytes"), "diskio_", ("*",)),
    Section("net", ("bytes_recv", "bytes_sent", "err_in", "err_out"), "net_", ("*",)),
)
"""Of every node."""

GPU = Section(
    "nvidia_gpu", ("utilization_gpu", "utilization_memory", "memory_used", "power_draw", "temperature_gpu"), "nvidia_smi_"
)
"""Of nodes with NVIDIA GPUs, by nvidia-smi."""

EFA = Section(
    "efa",
    (
        "efa_tx_bytes",
        "efa_rx_bytes",
        "efa_rdma_read_bytes",
        "efa_rdma_write_bytes",
        "efa_rx_dropped",
        "efa_retrans_timeout_events",
        "efa_unresponsive_remote_events",
    ),
    "",
)
"""Of nodes with EFA. The agent knows the section from 1.300068 on."""

GPU_UTILIZATION = "nvidia_smi_utilization_gpu"
"""In percent."""
CPU_UTILIZATION = "cpu_usage_active"
"""In percent, of all processors of a node together."""
DISK_USED = "disk_used_percent"
"""In percent; the largest value of a node is that of its fullest file system."""


def namespace_problem(namespace: str) -> str:
    """Why CloudWatch would not take a namespace, "" when it does. Source: API reference of PutMetricData."""
    if namespace.startswith("AWS/") or not re.fullmatch(r"[A-Za-z0-9._/#:-]{0,255}", namespace):
        return (
            f"namespace is {namespace!r}. Allowed: letters, digits and . - _ / # :, at most 255, not beginning with 'AWS/', or "
            "'' for no CloudWatch agent."
        )
    return ""
