"""Sums a tensor over all Neuron cores of all nodes: whether they find each other, before a model is put on them.

It needs torch-neuronx 2.9, the last with training support on Trainium, which the cluster's default image has. The repository's
tests have no Neuron device and do not run it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_backend  # noqa: F401  registers the backend "xla"


def main() -> None:
    dist.init_process_group("xla")
    ones = torch.ones(1, device=xm.xla_device())
    dist.all_reduce(ones)
    total = int(ones.cpu().item())
    assert total == dist.get_world_size(), f"{total} of {dist.get_world_size()} cores answered"
    if dist.get_rank() == 0:
        print(f"All {total} Neuron cores answered.")


if __name__ == "__main__":
    main()
