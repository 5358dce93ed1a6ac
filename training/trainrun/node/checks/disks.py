"""Writing to where a job writes: the agent's state, the instance store, volumes and shared file systems."""

from __future__ import annotations

import os
from pathlib import Path

from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.spec import StorageSpec

TEST_BYTES = 1024**2
STATE_FREE_BYTES = 1024**3
"""For the node's own logs, metrics, and what a launcher unpacks: less is a disk that is full within hours."""


def check_disk(folder: Path, *, node: str, least_free: int = 0) -> str:
    """Write a file, have it on the disk, read it back, and delete it.

    Args:
        folder: where.
        node: names the file, so that nodes do not meet on a shared file system.
        least_free: bytes that have to be free.

    Raises:
        StepFailed: it cannot be done, what is read is not what was written, or there is too little room.
    """
    file = folder / f".traincluster-check-{node}"
    wanted = os.urandom(TEST_BYTES)
    try:
        usage = os.statvfs(folder)
        write_through(file, wanted)
        found = file.read_bytes()
        file.unlink()
    except OSError as error:
        raise StepFailed(
            f"{folder} cannot be written and read: {error.strerror or error}. "
            "A file can be written, synced and read where the job writes. Is it mounted (findmnt), not read-only, not full (df)?"
        ) from None
    if found != wanted:
        raise StepFailed(f"{folder} does not give back what was written to it. Replace the instance, or what is mounted there.")
    free = usage.f_bavail * usage.f_frsize
    if free < least_free:
        raise StepFailed(
            f"{folder} has {free / 1024**3:.2f} GiB free, and {least_free / 1024**3:g} GiB are needed. "
            "Give the root volume more room, or free some of it."
        )
    return f"{folder} can be written, {free / 1024**3:.0f} GiB free"


def check_reading(folder: Path) -> str:
    """List a folder that is mounted for reading only.

    Raises:
        StepFailed: it cannot be listed.
    """
    try:
        entries = len(list(folder.iterdir()))
    except OSError as error:
        raise StepFailed(f"{folder} cannot be listed: {error.strerror or error}. Is it mounted (findmnt)?") from None
    return f"{folder} (for reading only) has {entries} entries"


def writable_folders(storage: StorageSpec, places: Places) -> list[Path]:
    """Where the job may write besides the agent's state."""
    paths = [storage.instance_store] if storage.instance_store else []
    paths += [volume.path for volume in storage.volumes]
    paths += [mount.path for mount in storage.mounts if "ro" not in mount.options.split(",")]
    return [places.root / path.lstrip("/") for path in paths]


def read_only_folders(storage: StorageSpec, places: Places) -> list[Path]:
    """What is mounted with the option "ro"."""
    return [places.root / mount.path.lstrip("/") for mount in storage.mounts if "ro" in mount.options.split(",")]


def write_through(file: Path, data: bytes) -> None:
    """Write a file, have it on the disk, and out of memory, so that what is read next is the disk's."""
    with file.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
