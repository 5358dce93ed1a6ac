"""What stage 3 keeps on a disk: whether this machine can, and copies of it in main memory for checkpoints."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainrun.settings import ShardingSettings

WEIGHTS = "weights"
"""The master weights among what is copied; all else is the optimizer's state by its keys."""


def nvme_problems(sharding: ShardingSettings) -> list[str]:
    """Why this machine cannot offload to a disk, as sentences."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    problems = []
    if not AsyncIOBuilder().is_compatible():
        problems.append(
            'Offload to "nvme" needs libaio with its headers. Install libaio-dev (Debian, Ubuntu) or libaio-devel (Amazon Linux, '
            "Fedora), or name where they are in $CFLAGS (-I...) and $LDFLAGS (-L...)."
        )
    missing = [tool for tool in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(tool) is None]
    if missing:
        problems.append(
            f'Offload to "nvme" is compiled at its first use, but {" and ".join(missing)} {"is" if len(missing) == 1 else "are"} '
            "not on PATH. Install g++ and ninja."
        )
    if not (Path(sharding.nvme_path).is_dir() and os.access(sharding.nvme_path, os.W_OK)):
        problems.append(f"sharding.nvme_path is {sharding.nvme_path!r}, which is no folder that can be written to here.")
    return problems


class DiskCopies:
    """Master weights and optimizer state that are on a disk, in main memory while a checkpoint is written or restored.

    Args:
        zero: the optimizer of DeepSpeed's engine, of stage 3.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self._copies: dict[int, dict[str, Tensor]] = {}

    def read(self) -> dict[int, dict[str, Tensor]]:
        """Copies of what is on the disk, by the number of DeepSpeed's sub-group; the same ones until `forget`."""
        if not self._copies:
            for number, flat in enumerate(self._zero.fp32_partitioned_groups_flat):
                if self._zero._swappable_optimizer_subgroup(number):
                    self._zero._optimizer_states_and_gradient_swap_in(number)
                    state = self._zero.optimizer.state.get(flat, {})
                    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim()}
                    self._copies[number] = {key: value.detach().clone() for key, value in {WEIGHTS: flat, **tensors}.items()}
                    self._zero._release_swap_buffers(number)
        return self._copies

    @torch.no_grad()
    def write(self) -> None:
        """Put the copies, whatever became of them, back onto the disk and into the parameters."""
        for number, copies in self._copies.items():
            flat = self._zero.fp32_partitioned_groups_flat[number]
            self._zero._optimizer_states_and_gradient_swap_in(number)
            flat.copy_(copies[WEIGHTS])
            state = self._zero.optimizer.state[flat] if len(copies) > 1 else {}
            for key, value in copies.items():
                if key in state:
                    state[key].copy_(value)
                elif key != WEIGHTS:
                    state[key] = value
            self._zero._reassign_or_swap_out_partitioned_parameters(number)
            self._zero._optimizer_states_and_gradient_swap_out(number)
        self.forget()

    def clear_state(self) -> None:
        """Let there be no state of the optimizer."""
        self._zero.optimizer_swapper.purge_state()
        self._copies = {number: {WEIGHTS: copies[WEIGHTS]} for number, copies in self.read().items()}

    def forget(self) -> None:
        """Give the memory back."""
        self._copies = {}
