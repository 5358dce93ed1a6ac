"""The store on S3. It takes its endpoint, region and credentials from the environment, as boto3 does."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from trainrun.store import Progress, Store, StoredObject, StoreError, StoreKeyMissing, too_short

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

MIB = 1024**2
# S3 takes 10,000 parts of 5 MiB to 5 GiB each (Amazon S3 user guide, "Multipart upload limits").
MOST_PARTS = 10_000
LARGEST_PART = 5 * 1024 * MIB
PART_SIZE = 32 * MIB
KEYS_PER_DELETE = 1000  # the most one DeleteObjects request takes (Amazon S3 API reference)

CONNECT_TIMEOUT_SECONDS = 10.0


class S3Store(Store):
    """A prefix of a bucket."""

    def __init__(self, bucket: str, prefix: str, *, read_timeout_seconds: float, attempts: int) -> None:
        self.bucket, self.prefix = bucket, prefix
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._options = (read_timeout_seconds, attempts)

    def put(self, key: str, data: bytes | memoryview, *, deadline: float | None = None, progress: Progress | None = None) -> None:
        reader = _MemoryReader(memoryview(data).cast("B"), deadline)
        config = self._transfer(len(reader.view), key)
        with self._errors("write", key):
            self._client.upload_fileobj(cast(IO[bytes], reader), self.bucket, self._full(key), Config=config)

    def put_new(self, key: str, data: bytes | memoryview, *, deadline: float | None = None) -> bool:
        try:
            with self._errors("write", key):
                self._client.put_object(Bucket=self.bucket, Key=self._full(key), Body=bytes(data), IfNoneMatch="*")
        except StoreError as error:
            cause = error.__cause__
            # 412: the key is taken. (A retry of a request whose answer was lost sees its own object so, too.)
            if isinstance(cause, ClientError) and cause.response["Error"]["Code"] in ("PreconditionFailed", "412"):
                return False
            raise
        return True

    def put_file(self, key: str, path: Path) -> None:
        with self._errors("write", key):
            self._client.upload_file(str(path), self.bucket, self._full(key), Config=self._transfer(path.stat().st_size, key))

    def get(self, key: str, start: int | None = None, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        first = start or 0
        last = "" if length is None else str(first + length - 1)
        whole = start is None and length is None
        with self._errors("read", key):
            return _retried(lambda: self._read(key, None if whole else f"bytes={first}-{last}"), self._options[1])

    def _read_block(self, key: str, start: int, into: memoryview, deadline: float | None) -> None:
        data = self.get(key, start, len(into))
        if len(data) < len(into):
            raise too_short(self.locate(key), start + len(data), start + len(into))
        into[:] = data

    def get_file(self, key: str, path: Path) -> None:
        with self._errors("read", key):
            self._client.download_file(self.bucket, self._full(key), str(path))

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self._full(prefix))
        with self._errors("list", prefix):
            for page in pages:
                for item in page.get("Contents", []):
                    key = item["Key"][len(self._full("")) :]
                    yield StoredObject(key, item["Size"], item["LastModified"].timestamp())

    def delete(self, keys: Iterable[str]) -> None:
        remaining = list(keys)
        while remaining:
            batch, remaining = remaining[:KEYS_PER_DELETE], remaining[KEYS_PER_DELETE:]
            with self._errors("delete", batch[0]):
                answer = self._client.delete_objects(
                    Bucket=self.bucket, Delete={"Objects": [{"Key": self._full(key)} for key in batch], "Quiet": True}
                )
            for failed in answer.get("Errors", []):
                raise StoreError(f"Could not delete s3://{self.bucket}/{failed.get('Key')}: {failed.get('Message')}.")

    def child(self, prefix: str) -> Store:
        timeout, attempts = self._options
        return S3Store(self.bucket, self._full(prefix).strip("/"), read_timeout_seconds=timeout, attempts=attempts)

    @property
    def _client(self) -> S3Client:
        return _client(*self._options)

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def _read(self, key: str, byte_range: str | None) -> bytes:
        try:
            if byte_range is None:
                return self._client.get_object(Bucket=self.bucket, Key=self._full(key))["Body"].read()
            return self._client.get_object(Bucket=self.bucket, Key=self._full(key), Range=byte_range)["Body"].read()
        except ClientError as error:
            if error.response["Error"]["Code"] in ("InvalidRange", "416"):  # the object ends before the range starts
                return b""
            raise

    def _transfer(self, size: int, key: str) -> TransferConfig:
        part = part_size(size, self.locate(key))
        return TransferConfig(multipart_threshold=part + 1, multipart_chunksize=part, max_concurrency=4)

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
                raise StoreKeyMissing(f"There is no {self.locate(key)}.") from None
            raise StoreError(f"Could not {verb} {self.locate(key)}: {error}.") from error
        except (Boto3Error, BotoCoreError, OSError) as error:
            raise StoreError(f"Could not {verb} {self.locate(key)}: {error}.") from error


def part_size(size: int, name: str) -> int:
    """Bytes of a part, so that an object of ``size`` bytes needs no more parts than S3 takes.

    Raises:
        StoreError: the object is larger than 10,000 parts of 5 GiB.
    """
    part = max(PART_SIZE, -(-size // MOST_PARTS))
    if part > LARGEST_PART:
        raise StoreError(f"{name} has {size} bytes. S3 takes {MOST_PARTS * LARGEST_PART}. Write it as several objects.")
    return part


class _MemoryReader(io.RawIOBase):
    """Bytes in memory as a file that boto3 can read, without copying them; it fails once the deadline is over."""

    def __init__(self, view: memoryview, deadline: float | None) -> None:
        self.view, self._deadline, self._at = view, deadline, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self.view)}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise TimeoutError("the time for it is over")
        end = len(self.view) if size is None or size < 0 else self._at + size
        chunk = bytes(self.view[self._at : end])
        self._at += len(chunk)
        return chunk


_clients: dict[tuple[int, str | None, float, int], S3Client] = {}


def _client(read_timeout_seconds: float, attempts: int) -> S3Client:
    """One client per process (boto3's clients do not survive a fork), endpoint and set of options."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    key = (os.getpid(), endpoint, read_timeout_seconds, attempts)
    if key not in _clients:
        _clients[key] = boto3.session.Session().client(
            "s3",
            config=Config(
                connect_timeout=CONNECT_TIMEOUT_SECONDS,
                read_timeout=read_timeout_seconds,
                retries={"mode": "standard", "total_max_attempts": attempts},
                # a server on an address or a name that has no wildcard DNS needs the bucket in the path
                s3={"addressing_style": "path"} if endpoint else {},
            ),
        )
    return _clients[key]


def _retried(read: Callable[[], bytes], attempts: int) -> bytes:
    """botocore retries requests, but not a body that breaks off."""
    for attempt in range(1, attempts):
        try:
            return read()
        except (HTTPClientError, OSError):
            time.sleep(min(0.1 * 2**attempt, 5.0))
    return read()
