"""The store on S3. It takes its endpoint, region and credentials from the environment, as boto3 does.

**The client** is boto3's, with uploads and retries of our own (`trainrun.s3_upload`, `trainrun.s3_requests`). Measured by
``benchmarks/store.py`` (512 MiB against a sink on the same two cores, http, nice 19, no torch; medians of 3 rounds):

| | write MB/s | CPU s/GB | read MB/s | CPU s/GB | start s |
|---|---|---|---|---|---|
| this store | 1751 | 0.85 | 1355 | 0.85 | 0.32 |
| boto3's transfers, threads | 450 | 2.32 | 769 | 1.36 | 0.30 |
| boto3's transfers, AWS CRT | 813 | 1.31 | 494 | 2.03 | 0.30 |
| awscrt's S3 client | 1221 | 0.85 | 487 | 2.03 | 0.10 |
| s3torchconnector 1.5 | 945 | 1.17 | 509 | 2.47 | 0.09 |

boto3 loses its time by copying bodies and by 16 KiB writes; given views of memory in pieces of 256 KiB it needs no more than the
CRT, and it reads into memory that is there already, where the others allocate. What it has beyond speed: conditional writes,
checksums of the caller, an end to a part at the deadline, errors with S3's own codes, and no threads that a fork would lose.
s3torchconnector has no conditional write and no abort; boto3's CRT mode passes no endpoint on and lets one process per machine
use it, where we have one per rank.

**Encryption** is the bucket's default; a KMS key of the bucket (with a bucket key) needs nothing from us.

**Request rates.** S3 takes at least 3,500 writes and 5,500 reads a second for each partitioned prefix, and answers 503 SlowDown
while it splits one (Amazon S3 user guide, "Best practices design patterns: optimizing Amazon S3 performance"). A new step is a
new prefix, so that the ranks of one save may share one such limit. In bytes that is 117 GB/s for parts of 32 MiB (what nine hosts
with 100 Gb/s each send), 470 GB/s for the parts of 128 MiB that shards from 8 GiB on have, and 92 GB/s for reads of 16 MiB. So
larger parts, and pauses that chance spreads, are enough; a hash in front of the keys would make listings by step impossible.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainrun.parallel import in_threads
from trainrun.s3_requests import PASSING_CODES, Requests, error_code
from trainrun.s3_upload import Upload
from trainrun.store import READ_BLOCK, READ_THREADS, Progress, Store, StoredObject, StoreError, check_deadline, too_short

KEYS_PER_DELETE = 1000  # the most one DeleteObjects request takes (Amazon S3 API reference)
_PAST_THE_END = {"InvalidRange", "416"}
RECEIVE_SIZE = 1024**2
"""Bytes between two looks at the deadline."""


class S3Store(Store):
    """A prefix of a bucket."""

    def __init__(self, bucket: str, prefix: str, *, read_timeout_seconds: float, attempts: int) -> None:
        self.bucket, self.prefix = bucket, prefix
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._options: dict[str, Any] = {"read_timeout_seconds": read_timeout_seconds, "attempts": attempts}
        self._requests = Requests(**self._options)

    def put(self, key: str, data: bytes | memoryview, *, deadline: float | None = None, progress: Progress | None = None) -> None:
        self._upload(key, data, deadline, progress, only_new=False).send()

    def put_new(
        self, key: str, data: bytes | memoryview, *, deadline: float | None = None, progress: Progress | None = None
    ) -> bool:
        return self._upload(key, data, deadline, progress, only_new=True).send()

    def put_file(self, key: str, path: Path) -> None:
        with path.open("rb") as file:

            def read(start: int, length: int) -> memoryview:
                data = os.pread(file.fileno(), length, start)
                if len(data) < length:
                    raise StoreError(f"Could not write {self.locate(key)}: {path} became shorter while it was read.")
                return memoryview(data)

            Upload(self._requests, self.bucket, self._full(key), os.fstat(file.fileno()).st_size, read).send()

    def get(self, key: str, start: int | None = None, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        first = start or 0
        wanted: Any = self._object(key)
        if start is not None or length is not None:
            wanted["Range"] = f"bytes={first}-{'' if length is None else first + length - 1}"

        def read(client: Any) -> bytes:
            try:
                body: bytes = client.get_object(**wanted)["Body"].read()
            except client.exceptions.ClientError as error:
                if error_code(error) in _PAST_THE_END:
                    return b""
                raise
            return body

        return self._requests(read, "read", self.locate(key))

    def _read_block(self, key: str, start: int, into: memoryview, deadline: float | None) -> None:
        """What a connection that broke has brought is kept; the next goes on from there."""
        filled = 0

        def read(client: Any) -> None:
            nonlocal filled
            wanted = f"{start + filled}-{start + len(into) - 1}"
            try:
                answer = client.get_object(**self._object(key), Range=f"bytes={wanted}")
            except client.exceptions.ClientError as error:
                if error_code(error) in _PAST_THE_END:
                    raise too_short(self.locate(key), start + len(into)) from None
                raise
            if filled + answer["ContentLength"] < len(into):
                answer["Body"].close()
                raise too_short(self.locate(key), start + len(into))
            while filled < len(into):
                check_deadline(deadline)
                count = answer["Body"].readinto(into[filled : filled + RECEIVE_SIZE])
                if not count:
                    raise ConnectionError(f"the answer ended after {filled} of {len(into)} bytes")
                filled += count
            answer["Body"].close()

        if into:
            self._requests(read, "read", self.locate(key), deadline=deadline)

    def get_file(self, key: str, path: Path) -> None:
        size = self._requests(lambda client: client.head_object(**self._object(key)), "read", self.locate(key))["ContentLength"]
        with path.open("wb") as file:

            def copy(start: int) -> None:
                block = memoryview(bytearray(min(READ_BLOCK, size - start)))
                self._read_block(key, start, block, None)
                os.pwrite(file.fileno(), block, start)

            in_threads([partial(copy, start) for start in range(0, size, READ_BLOCK)], READ_THREADS)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        wanted: dict[str, Any] = {"Bucket": self.bucket, "Prefix": self._full(prefix)}
        while True:
            page = self._requests(lambda client: client.list_objects_v2(**wanted), "list", self.locate(prefix))
            for item in page.get("Contents", []):
                key = item["Key"][len(self._full("")) :]
                yield StoredObject(key, item["Size"], item["LastModified"].timestamp())
            if not page["IsTruncated"]:
                return
            wanted["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, keys: Iterable[str]) -> None:
        remaining = [self._full(key) for key in keys]
        while remaining:
            self._delete_some(remaining[:KEYS_PER_DELETE])
            remaining = remaining[KEYS_PER_DELETE:]

    def _delete_some(self, full_keys: Sequence[str]) -> None:
        """S3 may delete some and answer for each of the others why not."""
        left = full_keys

        def delete(client: Any) -> None:
            nonlocal left
            answer = client.delete_objects(Bucket=self.bucket, Delete={"Objects": [{"Key": key} for key in left], "Quiet": True})
            errors = answer.get("Errors", [])
            if errors:
                left = [error["Key"] for error in errors]
                # as if the request had failed, which `Requests` knows how to judge
                stays = next((error for error in errors if error["Code"] not in PASSING_CODES | {"InternalError"}), errors[0])
                raise client.exceptions.ClientError({"Error": stays}, f"DeleteObjects of {stays['Key']}")

        self._requests(delete, "delete", f"s3://{self.bucket}/{full_keys[0]}" + (" and others" if len(full_keys) > 1 else ""))

    def child(self, prefix: str) -> Store:
        return S3Store(self.bucket, self._full(prefix).strip("/"), **self._options)

    def _upload(
        self, key: str, data: bytes | memoryview, deadline: float | None, progress: Progress | None, *, only_new: bool
    ) -> Upload:
        view = memoryview(data).cast("B")

        def read(start: int, length: int) -> memoryview:
            return view[start : start + length]

        return Upload(
            self._requests, self.bucket, self._full(key), len(view), read, only_new=only_new, deadline=deadline, progress=progress
        )

    def _object(self, key: str) -> dict[str, Any]:
        return {"Bucket": self.bucket, "Key": self._full(key)}

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key
