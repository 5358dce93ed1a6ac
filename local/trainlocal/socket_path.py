"""Names of Unix sockets that fit into a socket address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST_PATH = 100  # sun_path holds 108 bytes on Linux and 104 on macOS


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name of `path` that fits into a socket address, however deep its folder lies.

    Raises:
        ValueError: it does not fit, and this system has no other name for it.
    """
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    if not Path("/proc/self/fd").is_dir():
        raise ValueError(
            f"the folder {path.parent} has too long a name for a Unix socket ({_LONGEST_PATH} bytes); choose a shorter one"
        )
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
