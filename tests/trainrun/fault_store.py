"""A proxy before an S3 that does to requests what networks and servers do to them, and that checks what S3 checks.

It is told what to do in its own process or, by HTTP, from any other (`Faults`).
"""

from __future__ import annotations

import base64
import http.client
import json
import queue
import re
import socket
import struct
import threading
import time
import urllib.request
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, cast
from urllib.parse import urlsplit

CONTROL = "/_faults"
FOREVER = 10**9

Kind = Literal["answer", "delay", "drop", "silence", "lose", "hold", "truncate", "corrupt", "corrupt answer"]


@dataclass
class Fault:
    """What happens to some requests. The first fault that matches and has times left is the one that happens."""

    pattern: str
    """A regular expression that is searched in "METHOD /bucket/key?query"."""
    kind: Kind
    """
    - "answer": the store is not asked; ``status`` and ``code`` are the answer.
    - "delay": the request waits ``seconds`` before it goes on.
    - "drop": the connection is reset after ``after`` bytes of the request's body; the store is not asked.
    - "silence": the store is not asked, and nothing is ever answered.
    - "lose": the store does as it was asked, and the connection is reset instead of an answer.
    - "hold": the store does as it was asked, and nothing is ever answered.
    - "truncate": the connection is reset after ``after`` bytes of the answer's body.
    - "corrupt": the byte at ``after`` of the request's body is another one when the store gets it.
    - "corrupt answer": the byte at ``after`` of the answer's body is another one.
    """
    times: int = FOREVER
    skip: int = 0
    """Matching requests that pass before the first that is harmed."""
    seconds: float = 0.0
    after: int = 0
    status: int = 503
    code: str = "SlowDown"
    lacking: str = ""
    """Only requests without this header."""


class Faults:
    """Tells a proxy what to do, from any process that knows its URL."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def fail(self, pattern: str, kind: Kind = "answer", **fields: Any) -> None:
        """Add a fault; ``fields`` are those of `Fault`."""
        self._control("POST", asdict(Fault(pattern, kind, **fields)))

    def heal(self) -> None:
        """Forget all faults and requests; connections that wait in silence are reset."""
        self._control("DELETE")

    @property
    def requests(self) -> list[str]:
        """ "METHOD /bucket/key?query" of all requests since the start or the last `heal`, harmed or not."""
        return cast(list[str], self._control("GET"))

    def count(self, pattern: str) -> int:
        """How many of `requests` match."""
        return sum(bool(re.search(pattern, request)) for request in self.requests)

    def _control(self, method: str, content: Mapping[str, Any] | None = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.endpoint + CONTROL, data, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())


class FaultStore(Faults):
    """The proxy: ``FaultStore(endpoint_of_moto)``; AWS_ENDPOINT_URL should lead to its ``endpoint``."""

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.faults: list[Fault] = []
        self.seen: list[str] = []
        self.lock = threading.Lock()
        self.healed = threading.Event()
        self.unanswered: queue.SimpleQueue[str] = queue.SimpleQueue()
        """The requests that are not answered because of "silence" or "hold", as soon as it is so."""
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.store = self
        super().__init__(f"http://127.0.0.1:{self._server.server_port}")
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.healed.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def fault_of(self, request: str, headers: Mapping[str, str]) -> Fault | None:
        """The fault that happens to a request now."""
        with self.lock:
            self.seen.append(request)
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, request) and not (fault.lacking and fault.lacking in headers):
                    if fault.skip > 0:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    def control(self, method: str, body: bytes) -> Any:
        with self.lock:
            if method == "POST":
                self.faults.append(Fault(**json.loads(body)))
            if method == "DELETE":
                self.faults.clear()
                self.seen.clear()
                self.healed.set()
                self.healed = threading.Event()
            return list(self.seen)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    store: FaultStore

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are what this is for."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_any(self) -> None:
        store = self.server.store
        if self.path == CONTROL:
            body = self._read_body(None)
            self._answer(200, {}, json.dumps(store.control(self.command, body or b"")).encode())
            return
        path, _, query = self.path.partition("?")
        fault = store.fault_of(f"{self.command} {path}?{query}", self.headers)
        kind = fault.kind if fault else None
        if fault and kind == "delay":
            time.sleep(fault.seconds)
        if fault and kind == "drop":
            self._read_body(fault.after)
            self._reset()
            return
        body = self._read_body(None)
        if fault and kind == "silence":
            self._leave_unanswered()
        elif fault and kind == "answer":
            self._refuse(fault.status, fault.code)
        else:
            self._pass_on(_other_byte(body, fault.after) if fault and kind == "corrupt" else body, fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_any

    def _pass_on(self, body: bytes, fault: Fault | None) -> None:
        if not _checksum_fits(self.headers, body):
            self._refuse(400, "BadDigest")
            return
        status, headers, answer = self._ask(self.command, self.path, body, dict(self.headers.items()))
        if status == 200 and "uploadId=" in self.path and self.command == "POST" and not self._whole_object_fits():
            self._refuse(400, "BadDigest")
            return
        kind = fault.kind if fault else None
        if fault and kind == "lose":
            self._reset()
        elif fault and kind == "hold":
            self._leave_unanswered()
        elif fault and kind == "truncate":
            self._answer(status, headers, answer, answer[: fault.after])
            self._reset()
        else:
            self._answer(status, headers, _other_byte(answer, fault.after) if fault and kind == "corrupt answer" else answer)

    def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.server.store.upstream, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def _whole_object_fits(self) -> bool:
        """Whether an object just made of parts has the checksum that its client gave; if not, it is gone."""
        wanted = self.headers.get("x-amz-checksum-crc32")
        if wanted is None:
            return True
        path = self.path.partition("?")[0]
        if _crc32(self._ask("GET", path, b"", {})[2]) == wanted:
            return True
        self._ask("DELETE", path, b"", {})
        return False

    def _read_body(self, most: int | None) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            raise NotImplementedError("chunked requests")
        length = int(self.headers.get("Content-Length") or 0)
        return self.rfile.read(length if most is None else min(most, length))

    def _refuse(self, status: int, code: str) -> None:
        self._answer(
            status, {"Content-Type": "application/xml"}, f"<Error><Code>{code}</Code><Message>a fault</Message></Error>".encode()
        )

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes, sent: bytes | None = None) -> None:
        self.send_response_only(status)
        length = headers.get("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if sent is None else sent)

    def _leave_unanswered(self) -> None:
        healed = self.server.store.healed
        self.server.store.unanswered.put(f"{self.command} {self.path}")
        healed.wait()
        self._reset()

    def _reset(self) -> None:
        """End the connection so that the other side gets ECONNRESET."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def _other_byte(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def _checksum_fits(headers: Mapping[str, str], body: bytes) -> bool:
    """S3 refuses a body that is not what its checksum says. (On CompleteMultipartUpload the header is the whole object's.)"""
    wanted = headers.get("x-amz-checksum-crc32")
    return wanted is None or headers.get("x-amz-checksum-type") is not None or wanted == _crc32(body)
