"""Measure the all-reduce over all ranks of a run: a job's entry point, as ``trainrun.pretrain`` is, that trains nothing.

    torchrun --nproc-per-node=8 ... -m trainrun.bandwidth

With the entry point ``trainrun.bandwidth`` a cluster measures its own network: EFA between nodes, NVLink within. Rank 0
prints the bus bandwidth, and what is published for the type. Less than that, by more than the tolerance, fails the job.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from trainrun import devices
from trainrun.node.checks.allreduce_program import timed
from trainrun.node.checks.bandwidth import BYTES, PUBLISHED, judge
from trainrun.node.outcome import StepFailed
from trainrun.spec import RunSpec


def main(*, size: int = BYTES) -> int:
    """Measure, and judge. Returns the exit code, the same on all ranks."""
    device = devices.of_rank(local_rank=int(os.environ["LOCAL_RANK"]), local_size=int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.init_process_group(devices.backend(device))
    ranks, nodes = dist.get_world_size(), dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"])
    found = timed(torch, dist, device, size)
    figures = [found["bus_gb_per_second"], found["right"]]
    dist.broadcast_object_list(figures, device=device)  # so that all judge alike
    dist.destroy_process_group()
    source = f"{ranks} ranks on {nodes} nodes, {size / 1024**2:g} MiB"
    try:
        if not figures[1]:
            raise StepFailed(f"A sum over {source} is wrong. Check each node: python -m trainrun check.")
        text, code = judge(figures[0], published=published_for(nodes), source=source), 0
    except StepFailed as failure:
        text, code = str(failure), 1
    if int(os.environ["RANK"]) == 0:
        print(text, file=sys.stderr if code else sys.stdout, flush=True)
    return code


def published_for(nodes: int) -> float | None:
    """The figure for this type and number of nodes; None where there is none, or no document that names the type."""
    document = os.environ.get("TRAINRUN_SPEC")
    if not document:
        return None
    spec = RunSpec.from_json(Path(document).read_text(encoding="utf-8"))
    return PUBLISHED.get((spec.cluster.instance_type, nodes))


if __name__ == "__main__":
    sys.exit(main())
