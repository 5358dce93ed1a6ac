"""Files of a store on the node's own disk: each fetched once per node, checked, and shared by all its ranks."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainrun.directory import DirectoryStore
from trainrun.store import Store, StoreError

CHUNK = 1024**2


def cache_directory() -> Path:
    """``$TRAINRUN_CACHE``, else ``cache`` in ``$TRAINRUN_STATE``, else ``~/.cache/trainrun``."""
    if "TRAINRUN_CACHE" in os.environ:
        return Path(os.environ["TRAINRUN_CACHE"])
    if "TRAINRUN_STATE" in os.environ:
        return Path(os.environ["TRAINRUN_STATE"], "cache")
    return Path.home() / ".cache" / "trainrun"


def cached(store: Store, key: str, *, sha256: str) -> Path:
    """A local file with the object's content. A directory's files are used where they are.

    Raises:
        StoreError: the object could not be read, or is not what ``sha256`` says.
    """
    if isinstance(store, DirectoryStore):
        return store.directory / key
    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / sha256
    # The lock goes with the process that holds it, so that one that was killed leaves nothing to clean up.
    with _locked(directory / f"{sha256}.lock"):
        if not path.exists():
            partial = directory / f"{sha256}.partial"
            store.get_file(key, partial)
            found = file_digest(partial)
            if found != sha256:
                partial.unlink()
                raise StoreError(
                    f"{store.locate(key)} has the sha256 {found}, its dataset says {sha256}. It is damaged: write it anew."
                )
            partial.replace(path)
    return path


def file_digest(path: Path) -> str:
    """The file's sha256."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
