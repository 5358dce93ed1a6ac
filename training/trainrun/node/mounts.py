"""Shared file systems: FSx for Lustre and EFS."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path

from trainrun.node import lustre
from trainrun.node.commands import remark as what_it_said
from trainrun.node.environment import processors_here
from trainrun.node.fstab import Mounted
from trainrun.node.lnet import use_efa
from trainrun.node.outcome import StepFailed
from trainrun.node.substeps import Done
from trainrun.node.tools import Tools
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
    tools: Tools,
    mounted: Mounted,
    interface: str,
    pause: Callable[[float], None] = time.sleep,
) -> Done:
    """Mount a shared file system, now and after each boot. May run again. Returns what was done.

    Args:
        mount: the file system.
        tools: programs, and what runs them.
        mounted: what is mounted, and /etc/fstab.
        interface: name of the node's primary network interface, for Lustre by EFA.
        pause: waits.

    Raises:
        StepFailed: it cannot be mounted.
    """
    options = ",".join(part for part in (OPTIONS[mount.type], mount.options) if part)
    # By EFA it is for this program to mount it at each boot, once the interfaces are set up: earlier, it would go by TCP.
    at_boot = "noauto" if mount.efa else BOOT_OPTIONS
    changed = mounted.keep(mount.source, mount.path, mount.type, ",".join(part for part in (options, at_boot) if part))
    done = f"{mount.type} at {mount.path}"
    if not mounted.at(mount.path):
        remark = _need_client(mount, tools)
        way = f" by {use_efa(interface, run=tools.run)}" if mount.efa else ""
        said = _mount(mount, options, tools=tools, mounted=mounted, pause=pause)
        done, changed = f"{mount.type} mounted{way} at {mount.path}{remark}{what_it_said(said)}", True
    if mount.type == "lustre":
        tuned, newly = lustre.tune(tools.run)
        return Done(f"{done}, {tuned}", changed or newly)
    return Done(done, changed)


def _mount(mount: MountSpec, options: str, *, tools: Tools, mounted: Mounted, pause: Callable[[float], None]) -> str:
    """Mount it, with several attempts; what mount said."""
    Path(mount.path).mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", mount.type, *(["-o", options] if options else []), mount.source, mount.path]
    for seconds in (*PAUSES, None):
        try:
            return tools.run(*command)
        except StepFailed:
            if mounted.at(mount.path):  # the boot's own attempt came first
                return ""
            if seconds is None:
                raise
            pause(seconds)
    raise AssertionError("the last attempt returns or raises")


def _need_client(mount: MountSpec, tools: Tools) -> str:
    """Have what mounts such a file system. Returns a remark about what was installed for it.

    Raises:
        StepFailed: the image lacks it and it cannot be installed, with how to mend that.
    """
    try:
        return _need_lustre(tools) if mount.type == "lustre" else tools.need(f"mount.{mount.type}")
    except StepFailed as failure:
        raise StepFailed(f"{mount.source} cannot be mounted: {failure} {HINTS[mount.type]}.") from None


def _need_lustre(tools: Tools) -> str:
    """Have the client for the kernel that runs, and its options in place before its modules are loaded."""
    lustre.write_module_options(processors=processors_here())
    remark = ""
    if not _has_lustre(tools):
        if tools.packages is None:
            raise StepFailed("The image has no Lustre client for the kernel that runs.")
        remark = lustre.install_client(tools.packages, kernel=platform.release())
        if not _has_lustre(tools):
            raise StepFailed(f"The Lustre client was installed, but it has no modules for the kernel {platform.release()}.")
    return remark


def _has_lustre(tools: Tools) -> bool:
    """Whether there is a client with modules for this kernel. Loading one would set up its network before EFA is in it."""
    if not tools.has("mount.lustre"):
        return False
    try:
        tools.run("modinfo", "lustre")
    except StepFailed:
        return False
    return True
