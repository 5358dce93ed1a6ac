"""The store in a directory, on a local or a shared file system."""

from __future__ import annotations

import io
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from trainrun.store import Progress, Store, StoredObject, StoreError, StoreKeyMissing, check_deadline, too_short

CHUNK = 8 * 1024**2
"""Bytes between two looks at the deadline."""
SYNC_SIZE = 64 * 1024**2
"""Bytes that are made durable at a time, so that progress is what the disk has and not what memory has taken."""
ABANDONED_SECONDS = 3600.0
"""A temporary file that nobody has written to for so long is listed, so that who sweeps a directory finds it."""
_TEMPORARY = ".partial"


class DirectoryStore(Store):
    """A directory, on a local or a shared file system."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.expanduser().absolute()
        self.url = str(self.directory)

    def put(self, key: str, data: bytes | memoryview, *, deadline: float | None = None, progress: Progress | None = None) -> None:
        with self._errors("write", key):
            self._replace(key, _pieces(data), deadline, progress)

    def put_new(
        self, key: str, data: bytes | memoryview, *, deadline: float | None = None, progress: Progress | None = None
    ) -> bool:
        with self._errors("write", key):
            path = self._path(key)
            temporary = self._new_file(key, _pieces(data), deadline, progress)
            try:
                os.link(temporary, path)  # unlike a rename, a link never replaces
            except FileExistsError:
                # NFS says so too when its first answer was lost: then the link is ours
                if not os.path.samestat(temporary.stat(), path.stat()):
                    return False
            finally:
                temporary.unlink()
            _sync_directory(path.parent)
            return True

    def put_file(self, key: str, path: Path) -> None:
        with self._errors("write", key), path.open("rb") as source:
            self._replace(key, iter(lambda: source.read(CHUNK), b""), None, None)

    def get(self, key: str, start: int | None = None, length: int | None = None) -> bytes:
        with self._errors("read", key), self._path(key).open("rb") as file:
            file.seek(start or 0)
            return file.read(-1 if length is None else length)

    def _read_block(self, key: str, start: int, into: memoryview, deadline: float | None) -> None:
        with self._errors("read", key), self._path(key).open("rb", buffering=0) as file:
            file.seek(start)
            filled = 0
            while filled < len(into):
                check_deadline(deadline)
                count = file.readinto(into[filled:])
                if not count:
                    raise too_short(self.locate(key), start + len(into))
                filled += count

    def get_file(self, key: str, path: Path) -> None:
        with self._errors("read", key):
            shutil.copyfile(self._path(key), path)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        top = self.directory / prefix.rpartition("/")[0]
        with self._errors("list", prefix):
            keys = [p.relative_to(self.directory).as_posix() for p in _files_below(top)]
        for key in sorted(k for k in keys if k.startswith(prefix)):
            try:
                status = self._path(key).stat()
            except FileNotFoundError:  # deleted or renamed since
                continue
            if key.endswith(_TEMPORARY) and status.st_mtime > time.time() - ABANDONED_SECONDS:
                continue
            yield StoredObject(key, status.st_size, status.st_mtime)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            with self._errors("delete", key):
                path.unlink(missing_ok=True)
                self._remove_empty_directories(path.parent)

    def child(self, prefix: str) -> Store:
        return DirectoryStore(self.directory / prefix)

    def _path(self, key: str) -> Path:
        parts = PurePosixPath(key).parts
        if not parts or key.startswith("/") or ".." in parts:
            raise ValueError(f"{key!r} is not a key. Allowed: relative paths that stay inside the store.")
        return self.directory / key

    def _replace(self, key: str, pieces: Iterable[bytes | memoryview], deadline: float | None, progress: Progress | None) -> None:
        temporary = self._new_file(key, pieces, deadline, progress)
        try:
            temporary.replace(self._path(key))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_directory(self._path(key).parent)

    def _new_file(
        self, key: str, pieces: Iterable[bytes | memoryview], deadline: float | None, progress: Progress | None
    ) -> Path:
        """A durable file beside the key's own place, to be renamed to it."""
        path = self._path(key)
        _make_directory(path.parent)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_TEMPORARY}")
        try:
            with temporary.open("xb", buffering=0) as file:
                _write(file, pieces, deadline, progress)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _remove_empty_directories(self, directory: Path) -> None:
        while directory != self.directory and self.directory in directory.parents:
            try:
                directory.rmdir()
            except OSError:  # not empty, or gone
                return
            directory = directory.parent

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise StoreKeyMissing(f"There is no {self.locate(key)}.") from None
        except (IsADirectoryError, NotADirectoryError) as error:
            # To a reader there is no such object. A writer must hear why it cannot make one.
            kind = StoreKeyMissing if verb == "read" else StoreError
            raise kind(f"Could not {verb} {self.locate(key)}: {error}.") from None
        except OSError as error:
            raise StoreError(f"Could not {verb} {self.locate(key)}: {error}.") from error


def _pieces(data: bytes | memoryview) -> Iterator[memoryview]:
    view = memoryview(data).cast("B")
    return (view[start : start + CHUNK] for start in range(0, len(view), CHUNK))


def _write(file: io.FileIO, pieces: Iterable[bytes | memoryview], deadline: float | None, progress: Progress | None) -> None:
    written = durable = 0
    for piece in pieces:
        check_deadline(deadline)
        rest = memoryview(piece)
        while rest:
            count = file.write(rest)
            written += count
            rest = rest[count:]
        if written - durable >= SYNC_SIZE:
            os.fsync(file.fileno())
            durable = written
            if progress:
                progress(durable)
    os.fsync(file.fileno())
    check_deadline(deadline)
    if progress:
        progress(written)


def _make_directory(directory: Path) -> None:
    """With those above it, durably."""
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        _sync_directory(folder.parent)


def _files_below(top: Path) -> Iterator[Path]:
    """All files below a directory. One that cannot be read is an error, or it would pass for empty."""

    def fail(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):  # not there, or deleted meanwhile
            raise error

    for folder, _, names in os.walk(top, onerror=fail):
        yield from (path for name in names if (path := Path(folder, name)).is_file())


def _sync_directory(directory: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
