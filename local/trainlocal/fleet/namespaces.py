"""The few Linux calls that make a private world: namespaces, mounts, and death with one's parent.

Python has `os.unshare` and `os.setns` only from 3.12, and none of the others, hence `ctypes`.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2

_PR_SET_PDEATHSIG = 1
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


def _call(name: str, *arguments: object) -> None:
    """Call the C library; on failure raise OSError that names the call and its arguments."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        shown = ", ".join(str(a.decode() if isinstance(a, bytes) else a) for a in arguments)
        raise OSError(number, f"{name}({shown}): {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags` (CLONE_NEW*) for new ones."""
    _call("unshare", flags)


def enter(descriptor: int, kind: int) -> None:
    """Enter the namespace behind an open /proc/PID/ns/ file of the given kind (CLONE_NEW*)."""
    _call("setns", descriptor, kind)


def mount(source: str, target: str | Path, kind: str = "none", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    _call("mount", source.encode(), str(target).encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def bind(source: str | Path, target: str | Path, read_only: bool = False) -> None:
    """Show `source`, with all that is mounted below it, at `target`; the target is made when it is missing."""
    source, target = Path(source), Path(target)
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount(str(source), target, flags=MS_BIND | MS_REC)
    if read_only:
        # A user namespace may not clear flags that the host's mount has, so they are kept.
        mount("none", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY | _locked_flags(target))


def _locked_flags(target: Path) -> int:
    present = os.statvfs(target).f_flag
    pairs = ((os.ST_NOSUID, MS_NOSUID), (os.ST_NODEV, MS_NODEV), (os.ST_NOEXEC, MS_NOEXEC))
    return sum(mount_flag for stat_flag, mount_flag in pairs if present & stat_flag)


def pivot_root(new_root: Path) -> None:
    """Make `new_root` (a mount point) the root of this mount namespace and drop the old root."""
    os.chdir(new_root)
    number = _PIVOT_ROOT[os.uname().machine]
    _call("syscall", ctypes.c_long(number), b".", b".")  # the old root is stacked upon the new one ...
    _call("umount2", b".", MNT_DETACH)  # ... and taken off it
    os.chdir("/")


def set_hostname(name: str) -> None:
    """sethostname(2) in the present UTS namespace."""
    _call("sethostname", name.encode(), len(name.encode()))


def die_with_parent() -> None:
    """Have the kernel send SIGKILL to this process when its parent ends, however it ends."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def unshare_user(user_map: str, group_map: str) -> None:
    """Enter a new user namespace with the given maps (lines "inside outside count").

    The maps are written from outside the namespace, by a child that has stayed in the old one: only there does a
    privileged writer have the right to map more than its own id.
    """
    ready_read, ready_write = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(ready_write)
            os.read(ready_read, 1)
            process = Path(f"/proc/{parent}")
            if os.geteuid() != 0:
                (process / "setgroups").write_text("deny")  # the kernel demands it of unprivileged writers
            (process / "uid_map").write_text(user_map)
            (process / "gid_map").write_text(group_map)
            status = 0
        except OSError as error:
            os.write(2, f"trainlocal: the maps of the user namespace were refused: {error}\n".encode())
        finally:
            os._exit(status)
    os.close(ready_read)
    try:
        unshare(CLONE_NEWUSER)
    finally:
        os.close(ready_write)
        _, status = os.waitpid(child, 0)
    if status != 0:
        raise OSError("the kernel refused the uid or gid map of the user namespace")
