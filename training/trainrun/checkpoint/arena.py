"""The memory in which a rank's snapshots lie, which its writer sees too; and whether the machine has so much."""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from trainrun.config import ConfigError
from trainrun.memory import readable_size
from trainrun.ranks import Ranks
from trainrun.words import counted

PAGE = mmap.PAGESIZE


class Arena:
    """Shared memory without a name: it is gone with the last process that has it, however that ends.

    Attributes:
        descriptor: of the file that the memory is; whoever maps it sees the same bytes.
        bytes: the memory.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Take the memory, all of it.

        Args:
            size: bytes.
            device: that of the tensors which are copied here; a CUDA device copies faster into memory that it knows.

        Raises:
            MemoryError: the machine has not so much left.
        """
        size = max(PAGE, -(-size // PAGE) * PAGE)
        free = free_memory()
        if free is not None and size > free:  # to take it all the same would not fail but have a process killed
            raise MemoryError(f"a snapshot takes {readable_size(size)} of main memory, of which {readable_size(free)} are free")
        self.descriptor = _unnamed_file()
        try:
            os.ftruncate(self.descriptor, size)
            self.bytes: Tensor = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.bytes[::PAGE].zero_()  # a first touch gives each page its memory: now, and not while training waits for a copy
        self._pinned = device.type == "cuda"
        if self._pinned:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), size, 0)))  # type: ignore[no-untyped-call]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.bytes.numel()

    def __del__(self) -> None:
        if getattr(self, "_pinned", False):
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())  # type: ignore[no-untyped-call]
        if hasattr(self, "bytes"):
            os.close(self.descriptor)


def require_memory_for_snapshots(needed: int, ranks: Ranks) -> None:
    """Refuse to train where the snapshots of this machine's ranks would not find memory. Collective.

    Args:
        needed: bytes of this rank's snapshot.
        ranks: all of them.

    Raises:
        ConfigError: on all ranks, with what is needed and what there is.
    """
    by_host: dict[str, list[tuple[int, int | None]]] = {}
    for host, size, free in ranks.gather([platform.node(), needed, free_memory()]):
        by_host.setdefault(host, []).append((size, free))
    problems = []
    for host, found in by_host.items():
        total, free = sum(size for size, _ in found), min((free for _, free in found if free is not None), default=None)
        if free is not None and total > free:
            problems.append(
                f"Checkpoints need {readable_size(total)} of main memory on {host}, a copy of the state of its "
                f"{counted(len(found), 'rank')}, and {readable_size(free)} are free. Use more nodes, a type with more memory, or "
                "a strategy that divides the state among the ranks (fsdp2, zero3)."
            )
    if problems:
        raise ConfigError(problems)


def free_memory() -> int | None:
    """Bytes of main memory that this process could still take, by the machine and by its control groups; None if unknown."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        machine = int(next(line for line in text.splitlines() if line.startswith("MemAvailable:")).split()[1]) * 1024
    except (OSError, StopIteration):  # not Linux
        return None
    return max(0, min([machine, *_left_in_groups()]))


def _left_in_groups() -> Iterator[int]:
    """What the limits of the control groups (version 2) leave, from this process's own to the outermost that is visible."""
    top = Path("/sys/fs/cgroup")
    try:
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    group = top / own[3:].strip().lstrip("/")
    for folder in (group, *group.parents):
        if folder != top and top not in folder.parents:
            return
        try:
            limit = (folder / "memory.max").read_text().strip()
            if limit.isdigit():
                files = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used = int((folder / "memory.current").read_text()) - int(files.get("inactive_file", 0))
                yield int(limit) - used
        except (OSError, ValueError):  # the group of all has no files of its own
            continue


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("trainrun-snapshots")
    with tempfile.TemporaryFile() as file:  # unlinked already
        return os.dup(file.fileno())
