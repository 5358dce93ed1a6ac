"""An S3 fast enough not to be the limit: as little of it as the clients in the benchmarks need.

What is written to most buckets is thrown away (the kernel does, by MSG_TRUNC) but for objects up to `SMALL` bytes, and is read
as a pattern of the same size, by sendfile from memory. moto is slower than any client. Buckets whose names say so differ:

    kept...         keeps all objects
    at-300-...      takes 300 MB/s, over all connections

It checks nothing. ``python sink.py`` prints its port and serves until it is killed.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

MIB = 1024**2
SMALL = 4 * MIB
PATTERN = bytes(range(256))
_PATTERN_SIZE = 16 * MIB


@contextmanager
def running_sink() -> Iterator[str]:
    """The endpoint of a sink in a process of its own."""
    sink = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    try:
        assert sink.stdout is not None
        yield f"http://127.0.0.1:{int(sink.stdout.readline())}"
    finally:
        sink.kill()
        sink.wait()


def environment(endpoint: str) -> dict[str, str]:
    """This process's environment for one whose clients of AWS talk to the sink and to nothing else."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


class Piece(NamedTuple):
    """Bytes of an object; None for what was thrown away."""

    size: int
    content: memoryview | None


@dataclass
class Bucket:
    """Objects by key, and the parts of those that are being written."""

    keeps: bool
    seconds_a_byte: float
    objects: dict[str, list[Piece]] = field(default_factory=dict)
    uploads: dict[str, dict[int, Piece]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    free: float = 0.0
    """The time.monotonic at which it takes bytes again."""

    def pace(self, count: int) -> None:
        """Wait until ``count`` bytes may have arrived."""
        if not self.seconds_a_byte:
            return
        with self.lock:
            self.free = max(self.free, time.monotonic()) + count * self.seconds_a_byte
            wait = self.free - time.monotonic()
        if wait > 0.002:
            time.sleep(wait)


def _bucket(name: str) -> Bucket:
    rate = re.match(r"at-(\d+)-", name)
    return Bucket(keeps=name.startswith("kept"), seconds_a_byte=1e-6 / int(rate[1]) if rate else 0.0)


class Request(NamedTuple):
    """What a client asks, but for the body."""

    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: Mapping[str, str]

    @classmethod
    def parse(cls, head: str) -> Request:
        lines = head.split("\r\n")
        method, target, _ = lines[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        url = urlsplit(target)
        _, bucket, key = f"{unquote(url.path)}/".split("/", 2)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        return cls(method, bucket, key.removesuffix("/"), query, headers)


class Sink:
    """All buckets; one thread for each connection."""

    def __init__(self) -> None:
        self.buckets: dict[str, Bucket] = {}
        self.lock = threading.Lock()
        self.pattern = _pattern_file()

    def serve(self) -> None:
        """Print the port, and answer for ever."""
        server = socket.create_server(("127.0.0.1", 0), backlog=64)
        print(server.getsockname()[1], flush=True)
        while True:
            connection, _ = server.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve_connection, args=(connection,), daemon=True).start()

    def _serve_connection(self, connection: socket.socket) -> None:
        received = b""
        with connection, suppress(ConnectionError):  # clients end as they like
            while True:
                while b"\r\n\r\n" not in received:
                    more = connection.recv(65536)
                    if not more:
                        return
                    received += more
                head, _, received = received.partition(b"\r\n\r\n")
                request = Request.parse(head.decode())
                with self.lock:
                    bucket = self.buckets.setdefault(request.bucket, _bucket(request.bucket))
                if request.headers.get("expect"):
                    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                length = int(request.headers.get("content-length", 0))
                start, received = received[:length], received[length:]
                if request.method == "PUT":
                    piece = self._take(connection, bucket, request.headers, start, length)
                    self._put(connection, bucket, request, piece)
                else:
                    self._answer(connection, bucket, request, _receive(connection, length, start))

    def _take(self, connection: socket.socket, bucket: Bucket, headers: Mapping[str, str], start: bytes, length: int) -> Piece:
        """Receive a body of which ``start`` is there already."""
        size = int(headers.get("x-amz-decoded-content-length", length))
        if length > SMALL and not bucket.keeps:
            _swallow(connection, length - len(start), bucket)
            return Piece(size, None)
        bucket.pace(length)
        body = _receive(connection, length, start)
        return Piece(size, memoryview(body if size == length else _without_frames(body)))

    def _put(self, connection: socket.socket, bucket: Bucket, request: Request, piece: Piece) -> None:
        source = request.headers.get("x-amz-copy-source")
        with bucket.lock:
            if "uploadId" in request.query:
                bucket.uploads[request.query["uploadId"]][int(request.query["partNumber"])] = piece
            elif request.headers.get("if-none-match") and request.key in bucket.objects:
                _send(connection, "412 Precondition Failed", "<Error><Code>PreconditionFailed</Code></Error>")
                return
            else:
                copied = unquote(source or "").lstrip("/").partition("/")[2]
                bucket.objects[request.key] = bucket.objects[copied] if source else [piece]
        _send(connection, "200 OK", f"<CopyObjectResult>{_STAMP}</CopyObjectResult>" if source else "")

    def _answer(self, connection: socket.socket, bucket: Bucket, request: Request, body: bytearray) -> None:
        method, _, key, query, _ = request
        if method in ("GET", "HEAD") and not key:
            _send(connection, "200 OK", _listing(bucket, query) if "list-type" in query else "")
        elif method in ("GET", "HEAD"):
            self._get(connection, bucket, request)
        elif method == "DELETE":
            bucket.uploads.pop(query.get("uploadId", ""), None)
            bucket.objects.pop(key, None)
            _send(connection, "204 No Content")
        elif "delete" in query:
            for name in re.findall(r"<Key>(.*?)</Key>", body.decode()):
                bucket.objects.pop(name, None)
            _send(connection, "200 OK", "<DeleteResult></DeleteResult>")
        elif "uploadId" in query:
            parts = bucket.uploads.pop(query["uploadId"])
            bucket.objects[key] = [parts[number] for number in sorted(parts)]
            answer = f"<CompleteMultipartUploadResult><Key>{escape(key)}</Key>{_STAMP}</CompleteMultipartUploadResult>"
            _send(connection, "200 OK", answer)
        else:
            upload = os.urandom(8).hex()
            bucket.uploads[upload] = {}
            answer = f"<Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
            _send(connection, "200 OK", f"<InitiateMultipartUploadResult>{answer}</InitiateMultipartUploadResult>")

    def _get(self, connection: socket.socket, bucket: Bucket, request: Request) -> None:
        pieces = bucket.objects.get(request.key)
        if pieces is None:
            body = "" if request.method == "HEAD" else "<Error><Code>NoSuchKey</Code></Error>"
            _send(connection, "404 Not Found", body)
            return
        size = sum(piece.size for piece in pieces)
        first, last, status, more = 0, size - 1, "200 OK", {}
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
        if wanted:
            first, last = (int(wanted[1]), min(int(wanted[2] or last), last)) if wanted[1] else (size - int(wanted[2]), last)
            status, more = "206 Partial Content", {"Content-Range": f"bytes {first}-{last}/{size}"}
        if first > last and wanted:
            _send(connection, "416 Range Not Satisfiable", "<Error><Code>InvalidRange</Code></Error>")
            return
        more |= {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "Accept-Ranges": "bytes"}
        _send(connection, status, length=last - first + 1, headers=more)
        if request.method == "GET":
            self._send_pieces(connection, pieces, first, last + 1)

    def _send_pieces(self, connection: socket.socket, pieces: list[Piece], first: int, end: int) -> None:
        at = 0
        for piece in pieces:
            position, stop = max(first - at, 0), min(end - at, piece.size)
            while position < stop:
                if piece.content is not None:
                    connection.sendall(piece.content[position:stop])
                    position = stop
                else:
                    offset = (at + position) % len(PATTERN)
                    count = min(stop - position, _PATTERN_SIZE - offset)
                    position += os.sendfile(connection.fileno(), self.pattern, offset, count)
            at += piece.size


_STAMP = '<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"e"</ETag>'


def _send(
    connection: socket.socket, status: str, body: str = "", *, length: int | None = None, headers: Mapping[str, str] | None = None
) -> None:
    lines = {"ETag": '"e"', "Content-Length": str(len(body.encode()) if length is None else length), **(headers or {})}
    if status.startswith("204"):
        del lines["Content-Length"]
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    connection.sendall(f"HTTP/1.1 {status}\r\n{head}\r\n{body}".encode())


def _listing(bucket: Bucket, query: Mapping[str, str]) -> str:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    with bucket.lock:
        sizes = {key: sum(piece.size for piece in pieces) for key, pieces in sorted(bucket.objects.items())}
    contents, folders = "", dict[str, None]()
    for key, size in sizes.items():
        rest = key.removeprefix(prefix)
        if not key.startswith(prefix):
            continue
        if delimiter and delimiter in rest:
            folders[prefix + rest.partition(delimiter)[0] + delimiter] = None
        else:
            contents += f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size>{_STAMP}</Contents>"
    contents += "".join(f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders)
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"


def _swallow(connection: socket.socket, left: int, bucket: Bucket) -> None:
    trash = bytearray(MIB)
    throw_away = socket.MSG_TRUNC if sys.platform == "linux" else 0
    while left > 0:
        count = connection.recv_into(trash, min(left, MIB), throw_away)
        if not count:
            raise ConnectionError("the client is gone")
        bucket.pace(count)
        left -= count


def _receive(connection: socket.socket, length: int, start: bytes) -> bytearray:
    """A body of which ``start`` is there already."""
    body, at = bytearray(length), len(start)
    body[:at] = start
    while at < length:
        count = connection.recv_into(memoryview(body)[at:])
        if not count:
            raise ConnectionError("the client is gone")
        at += count
    return body


def _without_frames(body: bytearray) -> bytearray:
    """The content of a body in the encoding aws-chunked: frames of a size in hexadecimal, and as many bytes."""
    content, at = bytearray(), 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end].partition(b";")[0], 16)
        if not size:
            return content
        content += body[end + 2 : end + 2 + size]
        at = end + 2 + size + 2


def _pattern_file() -> int:
    """A file without a name, in memory where that can be had."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("pattern")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.write(file, PATTERN * (_PATTERN_SIZE // len(PATTERN)))
    return file


if __name__ == "__main__":
    Sink().serve()
