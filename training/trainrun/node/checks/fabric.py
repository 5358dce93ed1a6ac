"""NVIDIA's fabric manager: without it CUDA answers 802, system not yet initialized, on types with NVSwitch."""

from __future__ import annotations

import subprocess
import time

from trainrun.node.outcome import StepFailed
from trainrun.spec import ClusterSpec

SERVICE = "nvidia-fabricmanager"
WAIT_SECONDS = 120.0
"""It trains the links of all GPUs at its start, which takes a minute on the largest types."""

NVSWITCH_TYPES = (
    "p4d.24xlarge",
    "p4de.24xlarge",
    "p5.48xlarge",
    "p5e.48xlarge",
    "p5en.48xlarge",
    "p6-b200.48xlarge",
    "p6-b300.48xlarge",
)
"""Types whose GPUs are connected by NVSwitch on the instance itself
(docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html). On p6e-gb200 the switches are outside."""


def check_fabric(cluster: ClusterSpec, *, wait_seconds: float = WAIT_SECONDS) -> str:
    """Wait for the fabric manager on a type that needs it, and start it if it is not started.

    Raises:
        StepFailed: it is not active within ``wait_seconds``, with what systemd says of it.
    """
    if cluster.accelerator != "nvidia" or cluster.instance_type not in NVSWITCH_TYPES:
        return "no fabric manager needed"
    deadline = time.monotonic() + wait_seconds
    state = _systemctl("is-active", SERVICE)
    if state != "active":
        _systemctl("start", "--no-block", SERVICE)
    while state != "active":
        if time.monotonic() > deadline:
            status = _systemctl("status", "--no-pager", "--lines=5", SERVICE)
            seen = f"{SERVICE} is {state or 'not there'} after {wait_seconds:.0f} s"
            raise StepFailed(
                f"{seen}, and {cluster.instance_type} needs it:\n{status}\n"
                "Its version has to be the driver's: take an image whose driver and fabric manager go together."
            )
        time.sleep(min(2.0, wait_seconds / 4))
        state = _systemctl("is-active", SERVICE)
    return "fabric manager active"


def _systemctl(*arguments: str) -> str:
    """What systemctl prints, whatever its exit status; empty where there is none."""
    try:
        done = subprocess.run(["systemctl", *arguments], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
