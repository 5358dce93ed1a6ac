"""What a rank computes on: CPU, NVIDIA GPU (CUDA) or Trainium (Neuron), behind the same functions.

Neuron is what PyTorch calls a device of another vendor ("PrivateUse1", here named ``neuron``): `torch.accelerator` speaks for
it as it does for CUDA, so nothing below names it. Nothing here was run on CUDA or Neuron; the tests use stand-ins.
"""

from __future__ import annotations

import os
import pickle
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainrun.config import ConfigError
from trainrun.words import counted


@dataclass(frozen=True)
class Memory:
    """Of one rank, in bytes."""

    total: int
    """What this rank may use at most: the device's memory, or the rank's share of the machine's."""
    free: int
    """What it could still allocate."""


def of_rank(*, local_rank: int, local_size: int) -> torch.device:
    """The device of the ``local_rank``-th of ``local_size`` ranks on this machine, made the current one.

    Raises:
        ConfigError: the machine has accelerators, but fewer than ranks.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if count < local_size:
        raise ConfigError(
            [
                f"This machine shows {counted(count, f'{accelerator.type} device')} to {counted(local_size, 'rank')}, "
                "one for each. Start "
                f"torchrun with --nproc-per-node={count}, or make the others visible (CUDA_VISIBLE_DEVICES, "
                "NEURON_RT_VISIBLE_CORES)."
            ]
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def backend(device: torch.device) -> str:
    """The process group's backends for tensors on ``device`` and on the CPU: "gloo" or "cpu:gloo,cuda:nccl".

    Raises:
        ConfigError: no backend is registered for such a device.
    """
    if device.type == "cpu":
        return "gloo"
    try:
        return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    except ValueError:
        raise ConfigError(
            [f"torch.distributed has no backend for {device.type} devices. Import the package that brings it, or update it."]
        ) from None


def name(device: torch.device) -> str:
    """The device's name as its driver gives it, such as "NVIDIA H100 80GB HBM3"; its type where it has none."""
    if device.type == "cpu":
        return "cpu"
    of_device = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(of_device(device)) if of_device is not None else device.type


def memory(device: torch.device, *, local_size: int) -> Memory:
    """What this rank has. On a CPU the machine's memory (or its control group's) is shared among its ranks."""
    if device.type == "cpu":
        total = _machine_bytes() // local_size
        return Memory(total, max(0, total - _resident_bytes()))
    free, total = torch.accelerator.get_memory_info(device)
    cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return Memory(total, free + cached)


def peak_bytes(device: torch.device) -> int:
    """Most that was allocated on the device since `reset_peak`; on a CPU the most that was resident since the process began."""
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return int(torch.accelerator.max_memory_allocated(device))


def allocated_bytes(device: torch.device) -> int:
    """What tensors take on an accelerator at present."""
    return int(torch.accelerator.memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    """Let `peak_bytes` begin anew; a process's own peak cannot be."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on ``device``. Pinned memory is copied without waiting for the device."""
    return tensor.to(device, non_blocking=tensor.is_pinned()) if device.type == "cuda" else tensor.to(device)


def record_memory(device: torch.device, *, on: bool) -> None:
    """Begin or end to record who allocates what, where that can be recorded: on CUDA."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history("all" if on else None)


def memory_record(device: torch.device) -> bytes | None:
    """What was recorded, as a pickle for PyTorch's memory viewer; None where nothing can be."""
    return pickle.dumps(torch.cuda.memory._snapshot(device)) if device.type == "cuda" else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: on an accelerator, or on the CPU, where PyTorch has no class of its own for it."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def _machine_bytes() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdigit() else machine


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return peak_bytes(torch.device("cpu"))
