"""An all-reduce over ranks, timed: what `bandwidth` runs with the job's own Python.

Like `torch_program` it is handed over as text and imports torch only: ``python -c TEXT backend ranks bytes``. The processes
are forked from one that has imported torch, and not yet touched an accelerator.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from typing import Any

WARM_UP = 5
TIMES = 20


def timed(torch: Any, dist: Any, device: Any, size: int) -> dict[str, Any]:
    """Time all-reduces of ``size`` bytes in the process group. Returns the bus bandwidth, and whether a sum was right."""
    tensor = torch.zeros(size // 4, device=device)

    def settle() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize()

    for _ in range(WARM_UP):
        dist.all_reduce(tensor)
    settle()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(TIMES):
        dist.all_reduce(tensor)
    settle()
    seconds = (time.perf_counter() - started) / TIMES
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensor.fill_(rank + 1.0)
    dist.all_reduce(tensor)
    right = bool((tensor == ranks * (ranks + 1) / 2).all())
    return {"bus_gb_per_second": 2 * (ranks - 1) / ranks * size / seconds / 1e9, "seconds": seconds, "right": right}


def run(rank: int, backend: str, ranks: int, size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if backend != "gloo":
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        device = torch.device(kind.type, rank)
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    found = timed(torch, dist, device, size)
    if rank == 0:
        print("\n" + json.dumps(found), flush=True)
    dist.destroy_process_group()


def main() -> None:
    backend, ranks, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    import torch  # noqa: F401 - once, before the processes are forked

    children = set()
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                try:
                    run(rank, backend, ranks, size, folder)
                    os._exit(0)
                except Exception as error:
                    print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                finally:
                    os._exit(1)
            children.add(child)
        failed = False
        while children:
            child, status = os.wait()
            children.discard(child)
            if status and not failed:  # the others wait for it in vain
                failed = True
                for other in children:
                    os.kill(other, signal.SIGKILL)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
