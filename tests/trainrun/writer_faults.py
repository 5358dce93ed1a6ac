"""What befalls the process that writes checkpoints, in the tests. No torch, for it has none; `fault` is for its rank."""

from __future__ import annotations

import errno
import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainrun import directory
from trainrun.checkpoint import process
from trainrun.directory import DirectoryStore
from trainrun.store import check_deadline


def program(call: str) -> str:
    """That of a writer, with a ``call`` of a function of this module before it begins."""
    here = str(Path(__file__).parent)
    before = f"sys.path.append({here!r})\nimport writer_faults\nwriter_faults.{call}\nmain()"
    return process.PROGRAM.replace("\nmain()", f"\n{before}")


def fault(call: str) -> None:
    """Have the writers that this rank starts from now on run such a `program`."""
    process.PROGRAM = program(call)


def no_space_while(path: str) -> None:
    """ENOSPC at each write to a directory while there is such a file."""
    write = directory._write

    def limited(*arguments: Any) -> None:
        if Path(path).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments)

    directory._write = limited


def slow(seconds: float) -> None:
    """Each write to a directory takes so long, unless its deadline comes first."""
    write = directory._write

    def slowed(file: Any, pieces: Any, deadline: float | None, progress: Any) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            check_deadline(deadline)
            time.sleep(0.02)
        write(file, pieces, deadline, progress)

    directory._write = slowed


def kill_rank_after_put(count: int) -> None:
    """SIGKILL to the rank when so many objects were written."""
    after_put(count, lambda: os.kill(os.getppid(), signal.SIGKILL))


def kill_writer_after_put(count: int) -> None:
    """SIGKILL to this process when it has written so many objects."""
    after_put(count, lambda: os.kill(os.getpid(), signal.SIGKILL))


def stop_writer_after_put(count: int) -> None:
    """SIGSTOP to this process when it has written so many objects."""
    after_put(count, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def after_put(count: int, act: Callable[[], None]) -> None:
    """Do something when so many objects were written."""
    left = [count]

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            left[0] -= 1
            if left[0] == 0:
                act()
            return result

        return call

    from trainrun.s3 import S3Store  # boto3 takes long to import

    for store in (S3Store, DirectoryStore):
        for method in ("put", "put_new"):
            setattr(store, method, counted(getattr(store, method)))
