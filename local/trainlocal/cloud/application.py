"""The whole emulated account as one WSGI application: ours where moto lacks something, moto elsewhere."""

from __future__ import annotations

import io
import json
import re
import traceback
from collections.abc import Callable, Iterable
from threading import RLock
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

from trainlocal.cloud import inventory
from trainlocal.cloud.clients import Clients
from trainlocal.cloud.formation.account import StackAccount
from trainlocal.cloud.formation.api import serve_formation
from trainlocal.cloud.formation.waiting import serve_handle
from trainlocal.cloud.refusal import refuse
from trainlocal.cloud.resources.cloudformation import HANDLE_PATH
from trainlocal.cloud.services import install_all

INVENTORY_PATH = "/_traincluster/resources"
_SCOPE = re.compile(r"Credential=[^/]+/\d+/(?P<region>[^/]+)/(?P<service>[^/]+)/aws4_request")


class Application:
    """One emulated account.

    moto is not written for threads. Two locks make it safe: one for S3, where bodies of many megabytes are hashed, and
    one for all else, so that a long upload does not hold up the polling of the others. A body is read before the lock is
    taken and an answer is sent after it is released, so that no slow peer holds it.
    """

    def __init__(self) -> None:
        install_all()
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._locks = {"s3": RLock(), "other": RLock()}
        self.clients = Clients(self)
        self.stacks = StackAccount(self.clients)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        environ["wsgi.input"] = io.BytesIO(_body(environ))
        if environ["PATH_INFO"] == INVENTORY_PATH:
            return self._list_resources(environ, start_response)
        if environ["PATH_INFO"].startswith(HANDLE_PATH):
            return serve_handle(self.stacks, environ, start_response)
        service = _service(environ)
        if service == "cloudformation":
            return serve_formation(self.stacks, environ, start_response)
        with self._locks["s3" if service == "s3" else "other"]:
            try:
                return list(self._moto(environ, start_response))
            except Exception as error:
                if not isinstance(error, NotImplementedError):
                    traceback.print_exception(error)
                return refuse(environ, start_response, service=service, error=error)

    def _list_resources(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        region = dict(pair.split("=", 1) for pair in environ["QUERY_STRING"].split("&") if "=" in pair).get("region", "us-east-1")
        content = json.dumps(inventory.resources(self.clients, region), indent=1).encode()
        start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(content)))])
        return [content]


def _service(environ: dict[str, Any]) -> str:
    """The service that a request is signed for; an unsigned one is taken for S3, as moto does."""
    scope = _SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
    return scope["service"] if scope else "s3"


def _body(environ: dict[str, Any]) -> bytes:
    stream = environ["wsgi.input"]
    if environ.get("wsgi.input_terminated"):
        content: bytes = stream.read()
        environ["CONTENT_LENGTH"] = str(len(content))
        environ.pop("HTTP_TRANSFER_ENCODING", None)
    else:
        content = stream.read(int(environ.get("CONTENT_LENGTH") or 0))
    return content
