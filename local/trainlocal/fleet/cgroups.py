"""A control group of our own for the nodes, where this machine lets us have one: systemd cannot run without."""

from __future__ import annotations

import os
import time
from pathlib import Path


def _mounted_cgroup2() -> tuple[Path, str] | None:
    """Where the cgroup2 hierarchy is mounted here, and which group of it is shown there."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if rest.split()[0] == "cgroup2":
            _, _, _, root, point, *_ = fields.split()
            return Path(point), root
    return None


def own_group() -> Path:
    """The folder of the group that this process is in. Raises OSError, saying why, when there is none to be used."""
    mounted = _mounted_cgroup2()
    if mounted is None:
        raise OSError("no cgroup2 hierarchy is mounted")
    point, root = mounted
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::")), "")
    inside = os.path.relpath(path or "/", root)
    folder = point if inside == "." else point / inside
    if inside.startswith("..") or not folder.is_dir():
        raise OSError("this process's control group is not visible here")
    if not (os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)):
        raise OSError(
            f"the control group {folder} is not delegated to this user (systemd-run --user --scope -p Delegate=yes gives one)"
        )
    return folder


def make(name: str) -> Path:
    """Make the group `name` below this process's own. Raises OSError when the machine does not allow it."""
    group = own_group() / name
    group.mkdir()
    return group


def remove_abandoned(prefix: str) -> None:
    """Remove groups `prefix`PID beside ours whose process is no more: it was killed before it could clear away."""
    for group in own_group().glob(f"{prefix}[0-9]*"):
        if not is_alive(int(group.name.removeprefix(prefix))):
            remove(group)


def is_alive(pid: int) -> bool:
    """Whether a process runs. One that was killed and that its parent has not taken note of yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def join(group: Path) -> None:
    """Move this process into a group."""
    (group / "cgroup.procs").write_text("0")


def remove(group: Path, seconds: float = 5.0) -> None:
    """Kill what is left in a group and remove it with all below it, waiting at most `seconds` for the processes to go."""
    deadline = time.monotonic() + seconds
    while group.is_dir():
        _kill(group)
        try:
            for folder, _, _ in os.walk(group, topdown=False):
                Path(folder).rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _kill(group: Path) -> None:
    try:
        (group / "cgroup.kill").write_text("1")  # Linux 5.14 and later; before, the PID namespace has killed them all
    except OSError:
        return
