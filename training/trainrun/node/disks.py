"""Disks of the node: its instance store as one, and its EBS volumes.

A disk is known by its model and serial number, never by its device name: the order of NVMe devices is not stable on Nitro
instances (field case BOOT-09). Only a disk that holds nothing and is mounted nowhere is formatted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainrun.node.commands import Run
from trainrun.node.commands import remark as what_it_said
from trainrun.node.fstab import Mounted
from trainrun.node.outcome import StepFailed
from trainrun.node.substeps import Done
from trainrun.node.tools import Tools
from trainrun.spec import VolumeSpec

INSTANCE_STORE_MODEL = "Amazon EC2 NVMe Instance Storage"
"""The model of instance store disks (docs.aws.amazon.com/AWSEC2/latest/UserGuide/ssd-instance-store.html)."""

LABEL = "traincluster"
"""Name of the RAID array and label of its file system; XFS takes up to 12 letters."""

ATTACH_SECONDS = 60.0
"""How long an EBS volume may take to show."""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """One block device as lsblk shows it, and what is made of it: partitions, RAID arrays, logical volumes."""

    path: str
    model: str = ""
    serial: str = ""
    filesystem: str = ""
    """File system, or kind of member, that is on it; empty for a blank one."""
    label: str = ""
    mountpoint: str = ""
    parts: tuple[Disk, ...] = ()

    @property
    def is_blank(self) -> bool:
        """Whether nothing is on it, and nothing made of it."""
        return not self.filesystem and not self.mountpoint and not self.parts

    def tree(self) -> Iterator[Disk]:
        """It, and all that is made of it."""
        yield self
        for part in self.parts:
            yield from part.tree()


def read_disks(run: Run) -> list[Disk]:
    """All disks that have a device file here."""
    columns = "PATH,TYPE,MODEL,SERIAL,FSTYPE,LABEL,MOUNTPOINT"
    listing = json.loads(run("lsblk", "--json", "--output", columns) or '{"blockdevices": []}')
    disks = [_disk(entry) for entry in listing["blockdevices"] if entry.get("type") == "disk"]
    # A container sees the machine's disks in /sys and has no business with them.
    return [disk for disk in disks if Path(disk.path).exists()]


def _disk(entry: Mapping[str, Any]) -> Disk:
    def text(name: str) -> str:
        return (entry.get(name) or "").strip()

    return Disk(
        path=text("path"),
        model=text("model"),
        serial=text("serial"),
        filesystem=text("fstype"),
        label=text("label"),
        mountpoint=text("mountpoint"),
        parts=tuple(_disk(part) for part in entry.get("children") or ()),
    )


def prepare_instance_store(path: str, *, tools: Tools, mounted: Mounted) -> Done:
    """Mount the instance store at ``path``: all of its disks as one RAID 0. May run again. Returns what was done.

    Where the image has mounted it already (AWS's deep-learning images do), it is shown at ``path`` too. A node without
    instance store gets a folder of its root volume. There is no entry in /etc/fstab: the disks come back blank when the
    instance was stopped, so that each start of the agent has to look anew.

    Raises:
        StepFailed: the disks hold something else.
    """
    Path(path).mkdir(parents=True, exist_ok=True)
    if mounted.at(path):
        return Done(f"instance store at {path}")
    run = tools.run
    disks = [disk for disk in read_disks(run) if disk.model == INSTANCE_STORE_MODEL]
    if not disks:
        return Done(f"no instance store found, {path} is a folder of the root volume")
    in_use = [part.mountpoint for disk in disks for part in disk.tree() if part.mountpoint]
    if in_use:
        run("mount", "--bind", in_use[0], path)
        return Done(f"instance store, mounted by the image at {in_use[0]}, shown at {path}", changed=True)
    remark = tools.need("mkfs.xfs") + (tools.need("mdadm") if len(disks) > 1 else "")
    if not all(disk.is_blank for disk in disks):
        disks = _assembled(disks, run)
    device, made = _one_device(disks, run)
    if not made.label:
        run("mkfs.xfs", "-f", "-L", LABEL, device)
    run("mount", "-t", "xfs", "-o", "noatime", device, path)
    return Done(f"instance store of {len(disks)} disks at {path}{remark}", changed=True)


def _assembled(disks: list[Disk], run: Run) -> list[Disk]:
    """The disks after a reboot, when an array that this program made may have to be put together."""
    if all(disk.filesystem == "linux_raid_member" and not disk.parts for disk in disks):
        run("mdadm", "--assemble", "--scan")
        disks = [disk for disk in read_disks(run) if disk.model == INSTANCE_STORE_MODEL]
    for disk in disks:
        ours = {part.label for part in disk.tree() if part.label} <= {LABEL, f"any:{LABEL}"}
        array = disk.filesystem == "linux_raid_member" and len(disk.parts) == 1
        if not ours or not (array or (disk.filesystem == "xfs" and disk.label == LABEL)):
            what = disk.filesystem or ", ".join(part.filesystem or part.path for part in disk.parts)
            raise StepFailed(
                f"The instance store disk {disk.path} holds something that traincluster did not make ({what}). Remove it from "
                "the image, or leave instance_store out."
            )
    return disks


def _one_device(disks: list[Disk], run: Run) -> tuple[str, Disk]:
    """The one device that the disks make, and what is on it."""
    if len(disks) == 1:
        return disks[0].path, disks[0]
    if disks[0].parts:
        return disks[0].parts[0].path, disks[0].parts[0]
    device = f"/dev/md/{LABEL}"
    names = [disk.path for disk in disks]
    # The homehost "any" keeps the array's name the same, whatever the host is called.
    command = ("mdadm", "--create", device, "--run", "--level=0", f"--name={LABEL}", "--homehost=any")
    run(*command, f"--raid-devices={len(names)}", *names)
    return device, Disk(path=device)


def prepare_volume(
    volume: VolumeSpec,
    *,
    tools: Tools,
    mounted: Mounted,
    attached: Mapping[str, str],
    timeout: float = ATTACH_SECONDS,
    pause: Callable[[float], None] = time.sleep,
) -> Done:
    """Mount an EBS volume, formatted when it is blank. May run again. Returns what was done.

    Args:
        volume: the volume.
        tools: programs, and what runs them.
        mounted: what is mounted, and /etc/fstab.
        attached: volume id by the device name of the launch template, as EC2 tells it.
        timeout: how long the disk may take to show, in seconds.
        pause: waits.

    Raises:
        StepFailed: there is no such volume, or it holds partitions.
    """
    run = tools.run
    disk = _disk_of(volume, run=run, attached=attached, timeout=timeout, pause=pause)
    if disk.parts:
        raise StepFailed(f"The EBS volume {volume.device} ({disk.path}) holds partitions. Use a snapshot of a plain file system.")
    done, remark = "mounted", ""
    if not disk.filesystem:
        remark = tools.need("mkfs.xfs")
        run("mkfs.xfs", disk.path)
        done = "formatted and mounted"
    kind = disk.filesystem or "xfs"
    identity = run("blkid", "-s", "UUID", "-o", "value", disk.path).strip()
    changed = mounted.keep(f"UUID={identity}", volume.path, kind, "noatime,nofail")
    if mounted.at(volume.path):
        return Done(f"volume {volume.device} at {volume.path}", changed)
    Path(volume.path).mkdir(parents=True, exist_ok=True)
    said = run("mount", "-t", kind, "-o", "noatime", disk.path, volume.path)
    return Done(f"volume {volume.device} {done} at {volume.path}{remark}{what_it_said(said)}", changed=True)


def _disk_of(
    volume: VolumeSpec, *, run: Run, attached: Mapping[str, str], timeout: float, pause: Callable[[float], None]
) -> Disk:
    identifier = attached.get(volume.device)
    if identifier is None:
        raise StepFailed(
            f"EC2 tells of no volume {volume.device} of this instance. It tells of: {', '.join(attached) or 'none'}."
        )
    serial = identifier.replace("-", "")  # "vol-0123" is "vol0123" as a serial number
    xen = volume.device.replace("/dev/sd", "/dev/xvd")  # the types before Nitro keep the letter, and have no serial number
    for second in range(int(timeout) + 1):
        for disk in read_disks(run):
            if disk.serial == serial or (not disk.serial and disk.path in (volume.device, xen)):
                return disk
        if second < int(timeout):
            pause(1.0)
    raise StepFailed(f"The EBS volume {identifier} ({volume.device}) does not show as a disk within {int(timeout)} seconds.")
