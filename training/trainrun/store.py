"""Objects by key, in S3 or in a directory: the only way in which trainrun reads and writes what outlives a process.

No torch. boto3 is imported when the first ``s3://`` URL is opened (`trainrun.s3`).
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from urllib.parse import unquote, urlsplit

from trainrun.config import ConfigError
from trainrun.parallel import in_threads

READ_TIMEOUT_SECONDS = 20.0
ATTEMPTS = 7
READ_THREADS = 8
READ_BLOCK = 16 * 1024**2
"""Bytes of one request of `Store.read_into`: enough to make the request itself cheap, few enough to use all threads."""

Progress = Callable[[int], None]
"""Is told how many bytes have been sent (or are on the disk) so far; what is sent again does not count twice. It is called from
several threads, so that a smaller number may come after a larger one."""


class StoreError(Exception):
    """An operation on a store failed for good, that is after the retries; the message names the object."""

    def __str__(self) -> str:  # KeyError, which StoreKeyMissing also is, would show the message's repr
        return str(self.args[0])


class StoreKeyMissing(StoreError, KeyError):
    """There is no object of that key."""


class StoreObjectShort(StoreError):
    """An object ends before the range that was to be read of it."""


@dataclass(frozen=True)
class StoredObject:
    """One entry of a listing."""

    key: str
    """Relative to the store."""
    size: int
    """Bytes."""
    modified: float
    """Seconds since the epoch, by the store's clock."""


@dataclass(frozen=True)
class Range:
    """Bytes of an object, and the memory that they are read into."""

    key: str
    start: int
    """The first byte, from 0."""
    into: memoryview
    """Writable and contiguous; its size is that of the range."""


class Store(abc.ABC):
    """Objects by key under one URL. Keys are relative, with forward slashes. An object appears whole or not at all."""

    url: str
    """What `open_store` takes to open the same store; no slash at its end."""

    @abc.abstractmethod
    def put(self, key: str, data: bytes | memoryview, *, deadline: float | None = None, progress: Progress | None = None) -> None:
        """Write an object, durably. An object of the same key is replaced.

        Args:
            key: where to.
            data: any size; large ones go to S3 in parts.
            deadline: the `time.monotonic` after which no more bytes are sent; None means no end but that of silence.
            progress: is called while bytes move, for a watchdog. It must return quickly.

        Raises:
            StoreError: not written, after the retries, or larger than S3 takes.
        """

    @abc.abstractmethod
    def put_new(
        self, key: str, data: bytes | memoryview, *, deadline: float | None = None, progress: Progress | None = None
    ) -> bool:
        """Like `put`, but only if the key is free; False, and nothing written, when it is not.

        On S3 that is ``If-None-Match: *``, which a bucket's policy may demand of all writes. A write whose answer was lost
        is known again, and not taken for another's.
        """

    @abc.abstractmethod
    def put_file(self, key: str, path: Path) -> None:
        """Write an object from a file, in parts, without holding it in memory."""

    @abc.abstractmethod
    def get(self, key: str, start: int | None = None, length: int | None = None) -> bytes:
        """The object's bytes, or ``length`` of them from ``start``; fewer when the object ends before.

        Raises:
            StoreKeyMissing: there is no such object.
            StoreError: not read, after the retries.
        """

    def read_into(
        self,
        ranges: Iterable[Range],
        *,
        threads: int = READ_THREADS,
        deadline: float | None = None,
        done: Callable[[Range], None] | None = None,
    ) -> None:
        """Read ranges of any objects straight into memory, in parallel.

        Args:
            ranges: large ones are read in several requests. They must not overlap in memory.
            threads: requests in flight.
            deadline: the `time.monotonic` after which no more is read; None means no end but that of silence.
            done: called with each range as soon as all its bytes are there, in the thread that read the last of them, while
                others read on: the place to check a digest. What it raises ends the reading.

        Raises:
            StoreKeyMissing: an object is not there.
            StoreObjectShort: an object ends before the range does.
            StoreError: not read, after the retries. In every case no thread touches the memory any more.
        """
        blocks: list[Callable[[], None]] = []
        for item in ranges:
            blocks += self._blocks(item, deadline, done)
        in_threads(blocks, threads)

    def _blocks(self, item: Range, deadline: float | None, done: Callable[[Range], None] | None) -> list[Callable[[], None]]:
        """One call for each request that reads a range."""
        into, lock = item.into.cast("B"), Lock()
        starts = range(0, len(into), READ_BLOCK) or range(1)
        left = [len(starts)]

        def read(at: int) -> None:
            self._read_block(item.key, item.start + at, into[at : at + READ_BLOCK], deadline)
            with lock:
                left[0] -= 1
                last = left[0] == 0
            if last and done:
                done(item)

        return [partial(read, at) for at in starts]

    @abc.abstractmethod
    def _read_block(self, key: str, start: int, into: memoryview, deadline: float | None) -> None:
        """Fill ``into`` (bytes; maybe none) with the object's bytes from ``start``, or raise as `read_into` says."""

    @abc.abstractmethod
    def get_file(self, key: str, path: Path) -> None:
        """Write the object to a new file, without holding it in memory."""

    @abc.abstractmethod
    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """All objects whose key starts with ``prefix``, however many, in the order of their keys."""

    @abc.abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that is not there is no error."""

    @abc.abstractmethod
    def child(self, prefix: str) -> Store:
        """The store under ``prefix``."""

    def locate(self, key: str) -> str:
        """The full URL of an object, for messages."""
        return f"{self.url}/{key}"


def open_store(url: str, *, read_timeout_seconds: float = READ_TIMEOUT_SECONDS, attempts: int = ATTEMPTS) -> Store:
    """Open ``s3://bucket/prefix``, ``file:///directory`` or a directory's path. Nothing is contacted or created yet.

    Args:
        url: where.
        read_timeout_seconds: silence of S3 after which an attempt has failed.
        attempts: tries of each request to S3, with exponential back-off between them.

    Raises:
        ConfigError: another scheme, no bucket, an empty URL, no boto3.
    """
    parts = urlsplit(url)
    if not url:
        raise ConfigError(["The location is empty. Allowed: s3://bucket/prefix, file:///directory or a path."])
    if parts.scheme == "s3":
        if not parts.netloc:
            raise ConfigError([f"{url!r} names no bucket. Write s3://bucket/prefix."])
        try:
            from trainrun.s3 import S3Store
        except ImportError as error:
            raise ConfigError([f"{url!r} needs boto3, which is missing here ({error}). Install it: pip install boto3."]) from None
        return S3Store(parts.netloc, parts.path.strip("/"), read_timeout_seconds=read_timeout_seconds, attempts=attempts)
    from trainrun.directory import DirectoryStore

    if parts.scheme == "file":
        return DirectoryStore(Path(unquote(parts.path)))
    if "://" in url:
        raise ConfigError([f"{url!r} has the scheme {parts.scheme!r}. Allowed: s3://bucket/prefix, file:///directory or a path."])
    return DirectoryStore(Path(url))


def join_url(url: str, *names: str) -> str:
    """``url`` with ``names`` below it."""
    return "/".join([url.rstrip("/"), *names])


def check_deadline(deadline: float | None) -> None:
    """Raise TimeoutError once ``deadline`` (a `time.monotonic`) is over."""
    if deadline is not None and time.monotonic() > deadline:
        raise TimeoutError("the time for it is over")


def too_short(location: str, wanted: int) -> StoreObjectShort:
    """What to raise for a read up to byte ``wanted`` that goes past an object's end."""
    return StoreObjectShort(f"{location} has less than the {wanted} bytes up to which it was to be read.")
