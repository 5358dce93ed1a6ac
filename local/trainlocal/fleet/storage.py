"""Stand-ins for a node's disks and file systems: a folder is shown where EBS, FSx or EFS would be mounted.

This file is the program too: the node's image has it under the names in `PROGRAMS`, which real commands of the node call. It
also keeps a node from seeing, through /sys, the disks of this machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = (
    "usr/bin/lsblk",
    "usr/sbin/blkid",
    "usr/sbin/mkfs.xfs",
    "usr/sbin/modinfo",
    "usr/sbin/mount.efs",
    "usr/sbin/mount.lustre",
    "usr/sbin/mount.nfs4",
    "usr/sbin/mount.xfs",
)
DISKS = "/usr/lib/trainlocal/disks.json"
SHARED = "/srv/trainlocal/shared"
"""A folder that all nodes share: what one writes to a shared file system, the others read."""
OWN = "/srv/trainlocal/own"
MS_BIND = 4096


def install(shims: Path, interpreter: str, volumes: Sequence[str]) -> None:
    """Put the programs, and what they tell of the disks, into the node's image."""
    program = shims / "usr/lib/trainlocal/storage"
    program.parent.mkdir(parents=True, exist_ok=True)
    text = Path(__file__).read_text(encoding="utf-8")
    program.write_text(f"#!{interpreter} -I\n{text}", encoding="utf-8")
    program.chmod(0o755)
    for name in PROGRAMS:
        (shims / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(program, shims / name)
    disks = [{"path": device(number), "serial": volume.replace("-", "")} for number, volume in enumerate(volumes)]
    (shims / DISKS.lstrip("/")).write_text(json.dumps(disks), encoding="utf-8")


def device(number: int) -> str:
    """The device name of a volume: the first one is the root volume's."""
    return f"/dev/nvme{number}n1"


def folders(root: Path) -> Path:
    """Make the folders of the stand-ins below the node's root; returns where the shared one is to be shown."""
    for folder in (SHARED, OWN):
        (root / folder.lstrip("/")).mkdir(parents=True)
    return root / SHARED.lstrip("/")


def _lsblk() -> None:
    listed = []
    for number, disk in enumerate(json.loads(Path(DISKS).read_text(encoding="utf-8"))):
        formatted = number == 0 or _mark(disk["path"]).exists()
        listed.append(
            {
                "path": disk["path"],
                "type": "disk",
                "model": "Amazon Elastic Block Store",
                "serial": disk["serial"],
                "fstype": "xfs" if formatted else None,
                "label": None,
                "mountpoint": "/" if number == 0 else None,
            }
        )
    print(json.dumps({"blockdevices": listed}))


def _mark(path: str) -> Path:
    return Path(OWN, f"{Path(path).name}.formatted")


def _mount(kind: str, source: str, target: str) -> None:
    shared = kind != "xfs"
    folder = Path(SHARED if shared else OWN, re.sub(r"[^\w.-]", "_", source.removeprefix("/dev/")))
    folder.mkdir(exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(os.fsencode(folder), os.fsencode(target), None, MS_BIND, None):
        sys.exit(f"mount.{kind}: {target}: {os.strerror(ctypes.get_errno())}")
    others = "of all nodes" if shared else "of this node"
    print(f"a folder {others} stands in for {source}")


def main() -> None:
    """Act as the program by whose name this is called."""
    name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
    if name == "lsblk":
        _lsblk()
    elif name == "mkfs.xfs":
        _mark(arguments[-1]).touch()
    elif name == "blkid":
        print(uuid.uuid5(uuid.NAMESPACE_OID, arguments[-1]))
    elif name.startswith("mount."):
        _mount(name.removeprefix("mount."), *arguments[:2])
    elif arguments != ["lustre"]:  # modinfo
        sys.exit(f"modinfo: {' '.join(arguments)}: this node's image knows the stand-in for lustre alone")


if __name__ == "__main__":
    main()
