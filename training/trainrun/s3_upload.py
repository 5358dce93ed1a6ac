"""The writing of one object to S3, in one request or in parts."""

from __future__ import annotations

import io
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from trainrun.crc32 import crc32, encoded, joined
from trainrun.parallel import in_threads
from trainrun.s3_requests import Requests, error_code
from trainrun.store import Progress, StoreError, StoreKeyMissing, check_deadline

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")

MIB = 1024**2
# S3 takes 10,000 parts of 5 MiB to 5 GiB each (Amazon S3 user guide, "Multipart upload limits").
MOST_PARTS = 10_000
LARGEST_PART = 5 * 1024 * MIB
PART_SIZE = 32 * MIB
"""The smallest part that we send, but for the last of an object."""
COMFORTABLE_PART_SIZE, COMFORTABLE_PARTS = 128 * MIB, 64
"""Parts grow up to this size rather than become more than so many: fewer requests, and still enough for all threads."""
PART_THREADS = 8
ABORT_SECONDS = 10.0
SEND_SIZE = MIB // 4
"""Bytes between two looks at the deadline, each of which must leave within the connection's time-out."""

_TAKEN = {"PreconditionFailed", "412"}
_REFUSALS = {*_TAKEN, "NoSuchUpload"}
MARK = "trainrun-write"
"""Metadata of each object that tells the writer, whose answer was lost, whether the object is its own."""


def part_size(size: int, name: str) -> int:
    """Bytes of a part, so that an object of ``size`` bytes needs no more parts than S3 takes.

    Raises:
        StoreError: the object is larger than 10,000 parts of 5 GiB.
    """
    comfortable = min(-(-size // COMFORTABLE_PARTS), COMFORTABLE_PART_SIZE)
    part = max(PART_SIZE, comfortable, -(-size // MOST_PARTS))
    if part > LARGEST_PART:
        raise StoreError(f"{name} has {size} bytes. S3 takes {MOST_PARTS * LARGEST_PART}. Write it as several objects.")
    return part


@dataclass(frozen=True)
class Upload:
    """One object on its way. S3 checks each request's bytes and those of the whole against their CRC-32."""

    requests: Requests
    bucket: str
    key: str
    """In the bucket."""
    size: int
    read: Callable[[int, int], memoryview]
    """The bytes from, and how many. Called again for a part that is sent again."""
    only_new: bool = False
    """Whether an object of the same key is left as it is."""
    deadline: float | None = None
    progress: Progress | None = None

    @property
    def location(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    def send(self) -> bool:
        """False when the key is taken, and only a new one may be written.

        Raises:
            StoreError: not written, after the retries or at the deadline. No parts are left in the bucket, unless S3 does
                not even answer the request to drop them; then the bucket's lifecycle rule does it.
        """
        part = part_size(self.size, self.location)
        return self._send_whole() if self.size <= part else self._send_parts(part)

    def _send_whole(self) -> bool:
        data, sent, mark = self.read(0, self.size), _Sent(self.progress), uuid.uuid4().hex
        checksum = encoded(crc32(data))

        def put(client: S3Client, fields: Any) -> object:
            body = _body(data, self.deadline, partial(sent.report, 0))
            return client.put_object(
                **fields, Body=body, ChecksumAlgorithm="CRC32", ChecksumCRC32=checksum, Metadata={MARK: mark}
            )

        return self._finish(put, mark)

    def _send_parts(self, part: int) -> bool:
        mark, sent = uuid.uuid4().hex, _Sent(self.progress)
        upload_id = self._ask(
            lambda client: client.create_multipart_upload(
                **self._object, ChecksumAlgorithm="CRC32", ChecksumType="FULL_OBJECT", Metadata={MARK: mark}
            )
        )["UploadId"]
        written = False
        try:
            starts = range(0, self.size, part)
            parts: dict[int, _Part] = {}

            def send_part(number: int, start: int) -> None:
                parts[number] = self._send_part(upload_id, number, start, min(part, self.size - start), sent)

            in_threads([partial(send_part, number, start) for number, start in enumerate(starts, 1)], PART_THREADS)
            written = self._complete(upload_id, [parts[number] for number in sorted(parts)], mark)
        finally:
            if not written:
                self._abort(upload_id)
        return written

    def _send_part(self, upload_id: str, number: int, start: int, size: int, sent: _Sent) -> _Part:
        data = self.read(start, size)
        checksum = crc32(data)
        answer = self._ask(
            lambda client: client.upload_part(
                **self._object,
                UploadId=upload_id,
                PartNumber=number,
                Body=_body(data, self.deadline, partial(sent.report, number)),
                ChecksumAlgorithm="CRC32",
                ChecksumCRC32=encoded(checksum),
            )
        )
        return _Part(number, size, checksum, answer["ETag"])

    def _complete(self, upload_id: str, parts: list[_Part], mark: str) -> bool:
        whole = encoded(joined((part.checksum, part.size) for part in parts))
        listed: list[Any] = [
            {"PartNumber": part.number, "ETag": part.tag, "ChecksumCRC32": encoded(part.checksum)} for part in parts
        ]
        return self._finish(
            lambda client, fields: client.complete_multipart_upload(
                UploadId=upload_id,
                MultipartUpload={"Parts": listed},
                ChecksumCRC32=whole,
                ChecksumType="FULL_OBJECT",
                MpuObjectSize=self.size,
                **fields,
            ),
            mark,
        )

    def _finish(self, request: Callable[[S3Client, Any], object], mark: str) -> bool:
        """Make the request after which the object is there. An attempt whose answer was lost may have made it already: then
        S3 refuses the next (412, or 404 for parts that are an object by now), and the mark tells whose object it is."""
        condition = {"IfNoneMatch": "*"} if self.only_new else {}
        attempts = 0

        def attempt(client: S3Client) -> None:
            nonlocal attempts
            attempts += 1
            request(client, {**self._object, **condition})

        try:
            self._ask(attempt)
        except StoreError as error:
            code = error_code(error.__cause__)
            if code not in _REFUSALS:
                raise
            if attempts > 1 and self._is_own(mark):
                return True
            if code in _TAKEN:
                return False
            raise
        return True

    def _is_own(self, mark: str) -> bool:
        try:
            return self._ask(lambda client: client.head_object(**self._object))["Metadata"].get(MARK) == mark
        except StoreKeyMissing:
            return False

    def _abort(self, upload_id: str) -> None:
        with suppress(StoreError):
            self.requests(
                lambda client: client.abort_multipart_upload(**self._object, UploadId=upload_id),
                "drop the parts of",
                self.location,
                deadline=time.monotonic() + ABORT_SECONDS,
            )

    def _ask(self, call: Callable[[S3Client], T]) -> T:
        return self.requests(call, "write", self.location, deadline=self.deadline)

    @property
    def _object(self) -> Any:
        return {"Bucket": self.bucket, "Key": self.key}


@dataclass(frozen=True)
class _Part:
    number: int
    size: int
    checksum: int
    tag: str


class _Sent:
    """Counts what parts that are sent at the same time have sent. What is sent again counts once."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._lock = progress, threading.Lock()
        self._most: dict[int, int] = {}

    def report(self, part: int, sent: int) -> None:
        if self._progress is None:
            return
        with self._lock:
            more = sent > self._most.get(part, 0)
            if more:
                self._most[part] = sent
            total = sum(self._most.values())
        if more:
            self._progress(total)


class _Body(io.RawIOBase):
    """Bytes in memory as a file that boto3 can send without copying them; it fails once the deadline is over."""

    def __init__(self, view: memoryview, deadline: float | None, report: Callable[[int], None]) -> None:
        self._view, self._deadline, self._report, self._at = view, deadline, report, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._view)}[whence]
        return self._at

    def read(self, size: int | None = -1) -> Any:
        """A view of the next bytes; maybe more than ``size``, because urllib3 asks for 16 KiB at a time."""
        check_deadline(self._deadline)
        self._report(self._at)  # what was read before has been sent
        chunk = self._view[self._at : self._at + SEND_SIZE]
        self._at += len(chunk)
        return chunk


def _body(view: memoryview, deadline: float | None, report: Callable[[int], None]) -> IO[bytes]:
    return cast(IO[bytes], _Body(view, deadline, report))
