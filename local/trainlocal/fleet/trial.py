"""`python -m trainlocal.fleet.trial FOLDER`: all that an isolated node needs of the kernel, tried out.

Exit status 0 when it is to be had; otherwise the last line on standard error says what was refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from trainlocal.fleet import image, isolated
from trainlocal.fleet import namespaces as ns
from trainlocal.fleet.packages import image_layer


def _try(folder: Path) -> None:
    """Build the root of a node and the network around it in namespaces of our own, up to the start of its init."""
    mount_point, logs, shared = folder / "root", folder / "logs", folder / "shared"
    for each in (mount_point, logs, shared):
        each.mkdir()
    isolated.enter_world()
    ns.unshare(ns.CLONE_NEWNS | ns.CLONE_NEWNET | ns.CLONE_NEWPID)
    layer = image_layer()
    new = image.build(mount_point, layer=layer, instance_id="i-0", logs=logs, environment={}, volumes=[], shared=shared)
    child = os.fork()
    if child == 0:
        _exit_with(lambda: _finish(new))
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status))


def _finish(new: Path) -> None:
    image.mount_kernel_interfaces(new, with_cgroups=False)
    ns.pivot_root(new)


def _exit_with(action: Callable[[], None]) -> NoReturn:
    try:
        action()
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    _exit_with(lambda: _try(Path(sys.argv[1])))
