"""boto3 clients of the emulated account that call its application in this process, without a socket."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any
from urllib.parse import unquote, urlsplit

import boto3
from botocore.awsrequest import AWSPreparedRequest, AWSResponse, HeadersDict

Application = Callable[[dict[str, Any], Callable[..., Any]], Any]


class Clients:
    """Makes, and keeps, one client for each service and region."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self.endpoint = ""
        """URL by which others reach the account, once it is served."""
        self._session: Any = boto3.Session(aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1")
        self._made: dict[tuple[str, str], Any] = {}
        self._lock = Lock()

    def client(self, service: str, region: str) -> Any:
        """The client of one service in one region."""
        with self._lock:
            if (service, region) not in self._made:
                # An endpoint on loopback, so that a request could not leave the machine even if the handler were lost.
                client = self._session.client(service, region_name=region, endpoint_url="http://127.0.0.1")
                client.meta.events.register_first("before-send", self._answer)
                self._made[service, region] = client
            return self._made[service, region]

    def _answer(self, request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        answered: dict[str, Any] = {}

        def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> None:
            answered.update(status=int(status.split()[0]), headers=headers)

        body = b"".join(self._application(_environ(request), start_response))
        headers: Any = HeadersDict(answered["headers"])
        return AWSResponse(request.url, answered["status"], headers, _Raw(body))


class _Raw(io.BytesIO):
    """The body of an answer, in the two ways in which botocore reads it."""

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self.read()


def _environ(request: AWSPreparedRequest) -> dict[str, Any]:
    """The WSGI environment of a request that botocore would have sent."""
    url = urlsplit(request.url)
    body: Any = request.body or b""
    content = body.read() if hasattr(body, "read") else body.encode() if isinstance(body, str) else body
    environ: dict[str, Any] = {
        "REQUEST_METHOD": request.method,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote(url.path or "/", "latin-1"),
        "RAW_URI": url.path or "/",
        "QUERY_STRING": url.query,
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "CONTENT_LENGTH": str(len(content)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(content),
        "wsgi.errors": io.StringIO(),
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
        "HTTP_HOST": "127.0.0.1",
    }
    for name, value in request.headers.items():
        key = name.upper().replace("-", "_")
        text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
        if key == "CONTENT_TYPE":
            environ["CONTENT_TYPE"] = text
        elif key not in ("CONTENT_LENGTH", "TRANSFER_ENCODING", "HOST"):
            environ[f"HTTP_{key}"] = text
    return environ
