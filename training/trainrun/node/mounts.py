"""Shared file systems: FSx for Lustre and EFS."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from trainrun.node.commands import Run, remark
from trainrun.node.fstab import Mounted
from trainrun.node.lnet import use_efa
from trainrun.node.outcome import StepFailed
from trainrun.spec import MountSpec

OPTIONS = {
    "lustre": "noatime,flock",
    # The EFS guide's recommendation: docs.aws.amazon.com/efs/latest/ug/mounting-fs-nfs-mount-settings.html
    "nfs4": "nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport",
    "efs": "",
}
"""Options that a type always has. `flock` lets programs lock files across nodes."""

BOOT_OPTIONS = "_netdev,nofail"
"""In /etc/fstab: after the network; a boot does not hang when the file system cannot be reached."""

PAUSES = (2.0, 4.0, 8.0, 16.0, 32.0)
"""Waits between attempts: a fresh name may not resolve yet, and servers turn clients away when hundreds mount at once."""

HINTS = {
    "lustre": (
        "Amazon Linux: dnf install -y lustre-client. Ubuntu: add the repository of the FSx for Lustre client and apt-get install "
        "lustre-client-modules-$(uname -r). Its modules are made for one kernel each: bake both into the image"
    ),
    "nfs4": "Install nfs-common (Ubuntu) or nfs-utils (Amazon Linux) in the image",
    "efs": "Install amazon-efs-utils in the image, or set encrypt_in_transit of the file system to false",
}


def prepare_mount(
    mount: MountSpec,
    *,
    run: Run,
    mounted: Mounted,
    interface: str,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Mount a shared file system, now and after each boot. May run again. Returns what was done.

    Args:
        mount: the file system.
        run: runs commands.
        mounted: what is mounted, and /etc/fstab.
        interface: name of the node's primary network interface, for Lustre by EFA.
        pause: waits.

    Raises:
        StepFailed: it cannot be mounted.
    """
    options = ",".join(part for part in (OPTIONS[mount.type], mount.options) if part)
    # By EFA it is for this program to mount it at each boot, once the interfaces are set up: earlier, it would go by TCP.
    at_boot = "noauto" if mount.efa else BOOT_OPTIONS
    mounted.keep(mount.source, mount.path, mount.type, ",".join(part for part in (options, at_boot) if part))
    if mounted.at(mount.path):
        return f"{mount.type} at {mount.path}"
    _load_client(mount, run)
    way = f" by {use_efa(interface, run=run)}" if mount.efa else ""
    Path(mount.path).mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", mount.type, *(["-o", options] if options else []), mount.source, mount.path]
    for seconds in (*PAUSES, None):
        try:
            said = run(*command)
            break
        except StepFailed:
            if mounted.at(mount.path):  # the boot's own attempt came first
                return f"{mount.type} at {mount.path}"
            if seconds is None:
                raise
            pause(seconds)
    return f"{mount.type} mounted{way} at {mount.path}{remark(said)}"


def _load_client(mount: MountSpec, run: Run) -> None:
    """Check that the image can mount such a file system, and say how to mend it if not."""
    helper = f"mount.{mount.type}"
    try:
        run("sh", "-c", f'PATH="$PATH:/sbin:/usr/sbin"; command -v {helper}')
        if mount.type == "lustre":
            run("modinfo", "lustre")  # loading it would set up its network before EFA is in it
    except StepFailed as failure:
        raise StepFailed(f"{mount.source} cannot be mounted: {failure} {HINTS[mount.type]}.") from None
