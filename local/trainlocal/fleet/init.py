"""A small first process for nodes whose machine cannot give systemd a control group: cloud-init's stages, and reaping.

It runs inside the node (PID 1), with the image's Python and the standard library alone.
SIGTERM means: shut down, with a little time for the processes to end by themselves.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

STAGES = (("init", "--local"), ("init",), ("modules", "--mode=config"), ("modules", "--mode=final"))
CLOUD_INIT = "/usr/bin/cloud-init"
GRACE_SECONDS = 8.0


def _start(command: list[str]) -> int:
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()
            os.execv(command[0], command)
        finally:
            os._exit(127)
    return child


def _reap_until(child: int) -> None:
    """Reap whatever ends, until `child` has."""
    while True:
        try:
            ended, _ = os.wait()
        except ChildProcessError:
            return
        if ended == child:
            return


def _shut_down(number: int, frame: FrameType | None) -> None:
    """End everything: in its own PID namespace, -1 is all processes but this one."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        os.kill(-1, signal.SIGTERM)
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.05)
    except (ChildProcessError, ProcessLookupError):
        pass  # nothing is left
    os._exit(0)  # the kernel kills what remains in the namespace


def main() -> None:
    """Run the stages, then reap for ever."""
    signal.signal(signal.SIGTERM, _shut_down)
    for stage in STAGES:
        print(f"trainlocal init: cloud-init {' '.join(stage)}", flush=True)
        _reap_until(_start([CLOUD_INIT, *stage]))
    print("trainlocal init: cloud-init is done", flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigtimedwait({signal.SIGCHLD}, 5)


if __name__ == "__main__":
    main()
