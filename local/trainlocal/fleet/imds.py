"""The instance metadata service of one node, in version 2 of its protocol.

Source of the protocol: Amazon EC2 User Guide, "Use the Instance Metadata Service to access instance metadata":
a session token comes by PUT /latest/api/token with a lifetime of 1 to 21600 seconds; every GET must carry it.
400 = bad PUT, 401 = token missing, unknown or expired, 403 = request not allowed (a PUT that was forwarded),
404 = no such item. Version 1 (GET without a token) is refused, as it is by instances that require tokens.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, get_args

from trainlocal.fleet.instances import Instance

TOKEN_HEADER = "X-aws-ec2-metadata-token"
LIFETIME_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
LONGEST_LIFETIME = 21600
CREDENTIALS_LIFETIME = timedelta(hours=6)

LIFECYCLE = "meta-data/autoscaling/target-lifecycle-state"
"""What the instance's group wants of it: "InService", or "Terminated" from when it has decided to end it."""

Item = str | bytes | Callable[[], str]
Failure = Literal["error", "silence"]
"""How the service fails: each request is answered with 500, or not at all."""


def _iso(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _credentials() -> str:
    """Credentials of the instance's role. The emulated cloud accepts any; these are of the right form and expire."""
    now = datetime.now(timezone.utc)
    return json.dumps(
        {
            "Code": "Success",
            "LastUpdated": _iso(now),
            "Type": "AWS-HMAC",
            "AccessKeyId": "ASIAIOSFODNN7EXAMPLE",
            "SecretAccessKey": "trainlocal",
            "Token": "trainlocal",
            "Expiration": _iso(now + CREDENTIALS_LIFETIME),
        }
    )


def items_of(instance: Instance) -> dict[str, Item]:
    """All that the service tells of an instance: path below /latest/ -> content."""
    document = {
        "accountId": instance.account,
        "architecture": instance.architecture,
        "availabilityZone": instance.zone,
        "imageId": instance.image,
        "instanceId": instance.id,
        "instanceType": instance.type,
        "pendingTime": _iso(instance.launched),
        "privateIp": instance.address,
        "region": instance.region,
        "version": "2017-09-30",
    }
    interface = f"meta-data/network/interfaces/macs/{instance.mac}"
    items: dict[str, Item] = {
        "dynamic/instance-identity/document": json.dumps(document),
        "meta-data/ami-id": instance.image,
        LIFECYCLE: "InService",
        "meta-data/ami-launch-index": str(instance.launch_index),
        "meta-data/hostname": instance.hostname,
        "meta-data/instance-id": instance.id,
        "meta-data/instance-life-cycle": instance.life_cycle,
        "meta-data/instance-type": instance.type,
        "meta-data/local-hostname": instance.hostname,
        "meta-data/local-ipv4": instance.address,
        "meta-data/mac": instance.mac,
        f"{interface}/device-number": "0",
        f"{interface}/local-hostname": instance.hostname,
        f"{interface}/local-ipv4s": instance.address,
        f"{interface}/mac": instance.mac,
        f"{interface}/owner-id": instance.account,
        f"{interface}/subnet-id": instance.subnet,
        f"{interface}/vpc-id": instance.vpc,
        f"{interface}/vpc-ipv4-cidr-block": instance.vpc_cidr,
        "meta-data/placement/availability-zone": instance.zone,
        "meta-data/placement/region": instance.region,
        "meta-data/services/domain": "amazonaws.com",
        "meta-data/services/partition": "aws",
    }
    if instance.security_groups:
        items["meta-data/security-groups"] = "\n".join(instance.security_groups)
    for key, value in instance.tags.items():
        items[f"meta-data/tags/instance/{key}"] = value
    if instance.role:
        items[f"meta-data/iam/security-credentials/{instance.role}"] = _credentials
    if instance.user_data:
        items["user-data"] = instance.user_data
    return items


class MetadataServer:
    """Serves `items` on a listening socket, from threads of its own, until `close`.

    `items` may be changed at any time with `set`: a spot notice is an item that appears.
    """

    def __init__(self, listener: socket.socket, items: Mapping[str, Item]) -> None:
        self._items = dict(items)
        self._tokens: dict[str, float] = {}
        self._lock = threading.Lock()
        self._works = threading.Event()
        self._works.set()
        self.failure: Failure | None = None
        self.port: int = listener.getsockname()[1]
        self._server = _HttpServer(listener, self)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()

    def set(self, path: str, content: str | None) -> None:
        """Set the item at `path` (as in "meta-data/spot/instance-action"), or take it away with None."""
        with self._lock:
            if content is None:
                self._items.pop(path, None)
            else:
                self._items[path] = content

    def fail(self, how: Failure | None) -> None:
        """Fail from now on, in this way, or (None) work again. What has been asked meanwhile stays without an answer.

        Raises:
            ValueError: no such way.
        """
        if how not in (None, *get_args(Failure)):
            raise ValueError(f"the metadata service cannot fail by {how!r}; it knows {', '.join(get_args(Failure))}")
        self.failure = how
        if how == "silence":
            self._works.clear()
        else:
            self._works.set()

    def wait_while_silent(self) -> None:
        """Return when there is no silence any more."""
        self._works.wait()

    def new_token(self, lifetime: int) -> str:
        """A session token that is valid for `lifetime` seconds."""
        token = secrets.token_urlsafe(32)
        with self._lock:
            now = time.monotonic()
            self._tokens = {known: end for known, end in self._tokens.items() if end > now}
            self._tokens[token] = now + lifetime
        return token

    def is_valid(self, token: str | None) -> bool:
        """Whether a token was given out here and has not expired."""
        with self._lock:
            return token is not None and self._tokens.get(token, 0.0) > time.monotonic()

    def content(self, path: str) -> bytes | None:
        """The item at `path`, the listing of a folder, or None when there is neither."""
        with self._lock:
            item = self._items.get(path)
            if item is None:
                item = self._listing(path)
        if callable(item):
            item = item()
        return item.encode() if isinstance(item, str) else item

    def _listing(self, path: str) -> str | None:
        folder = path.rstrip("/") + "/" if path else ""
        names = set()
        for known in self._items:
            if known.startswith(folder):
                name, slash, _ = known[len(folder) :].partition("/")
                names.add(name + slash)
        return "\n".join(sorted(names)) or None

    def close(self) -> None:
        """Stop serving and close the socket."""
        self._works.set()
        self._server.shutdown()
        self._server.server_close()


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket, metadata: MetadataServer) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.metadata = metadata


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _HttpServer

    def do_PUT(self) -> None:
        if self.server.metadata.failure is not None:
            return self._fail()
        if self.path != "/latest/api/token":
            return self._answer(404)
        if self.headers.get("X-Forwarded-For"):
            return self._answer(403)
        lifetime = self.headers.get(LIFETIME_HEADER, "")
        if not lifetime.isascii() or not lifetime.isdigit() or not 1 <= int(lifetime) <= LONGEST_LIFETIME:
            return self._answer(400)
        return self._answer(200, self.server.metadata.new_token(int(lifetime)).encode(), {LIFETIME_HEADER: lifetime})

    def do_GET(self) -> None:
        if self.server.metadata.failure is not None:
            return self._fail()
        if not self.server.metadata.is_valid(self.headers.get(TOKEN_HEADER)):
            return self._answer(401)
        version, _, path = self.path.lstrip("/").partition("/")
        if not version:
            return self._answer(200, b"latest")
        # Dated versions ("2021-03-23") are answered as the latest one, which has all that they have.
        is_dated = len(version) == 10 and version.replace("-", "").isdigit()
        content = self.server.metadata.content(path) if version == "latest" or is_dated else None
        return self._answer(404) if content is None else self._answer(200, content)

    def _fail(self) -> None:
        if self.server.metadata.failure == "error":
            self._answer(500)
        else:
            self.server.metadata.wait_while_silent()
            self.close_connection = True

    def _answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing: the console belongs to the node."""
