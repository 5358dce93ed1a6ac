"""The random streams of a process, as tensors and values by name: ``rng/<rank>/torch|numpy|python|<device>``."""

from __future__ import annotations

import random

import numpy as np
import torch

from trainrun.checkpoint.tensors import Named, Values


def random_state(rank: int, device: torch.device) -> tuple[Named, Values]:
    """The random streams of this process."""
    prefix = f"rng/{rank}"
    algorithm, keys, position, has_gauss, gauss = np.random.get_state()
    version, numbers, next_gauss = random.getstate()
    tensors = {
        f"{prefix}/torch": torch.get_rng_state(),
        f"{prefix}/numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        f"{prefix}/python": torch.tensor(numbers, dtype=torch.int64),
    }
    if device.type != "cpu":
        tensors[f"{prefix}/{device.type}"] = torch.get_device_module(device).get_rng_state(device)
    values = {
        f"{prefix}/numpy": [algorithm, int(position), int(has_gauss), float(gauss)],
        f"{prefix}/python": [version, next_gauss],
    }
    return tensors, values


def load_random_state(rank: int, device: torch.device, tensors: Named, values: Values) -> None:
    """Set the random streams of this process to what `random_state` took."""
    prefix = f"rng/{rank}"
    torch.set_rng_state(tensors[f"{prefix}/torch"])
    algorithm, position, has_gauss, gauss = values[f"{prefix}/numpy"]
    keys = tensors[f"{prefix}/numpy"].numpy().astype(np.uint32)
    np.random.set_state((algorithm, keys, position, has_gauss, gauss))
    version, next_gauss = values[f"{prefix}/python"]
    random.setstate((version, tuple(tensors[f"{prefix}/python"].tolist()), next_gauss))
    if f"{prefix}/{device.type}" in tensors:
        torch.get_device_module(device).set_rng_state(tensors[f"{prefix}/{device.type}"], device)
