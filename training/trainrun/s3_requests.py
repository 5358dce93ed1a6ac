"""Requests to S3: the client that makes them, and which of them are made again after a failure."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
)
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from trainrun.store import StoreError, StoreKeyMissing, check_deadline

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")

CONNECT_TIMEOUT_SECONDS = 10.0
SHORTEST_TIMEOUT_SECONDS = 1.0
METADATA_ATTEMPTS = 5
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 20.0

FAILURES = (ClientError, BotoCoreError, HTTPError, OSError)
"""All that a request raises, also while its body is read."""
# Connections that break or keep silent, answers that are garbage or whose checksum is wrong, credentials that did not come.
_PASSING = (
    HTTPClientError,
    HTTPError,
    OSError,
    IncompleteReadError,
    FlexibleChecksumError,
    ResponseParserError,
    CredentialRetrievalError,
    MetadataRetrievalError,
)
# From "Error responses" of the Amazon S3 API reference: those below 500 that the same request may not get again.
PASSING_CODES = {
    *("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"),
    *("RequestTimeout", "RequestTimeoutException", "OperationAborted", "ConditionalRequestConflict", "IncompleteBody"),
    *("BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"),
}
_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_MISSING_CODES = {"NoSuchKey", "404"}


class Requests:
    """Makes requests, and makes them again after failures that pass, with pauses that grow and that chance spreads."""

    def __init__(self, *, read_timeout_seconds: float, attempts: int) -> None:
        self._read_timeout, self._attempts = read_timeout_seconds, attempts

    def __call__(self, call: Callable[[S3Client], T], verb: str, location: str, *, deadline: float | None = None) -> T:
        """The result of ``call(client)``.

        Args:
            call: makes one request; it may be called several times.
            verb: what the request does, for messages: "write".
            location: what to: "s3://bucket/key".
            deadline: the `time.monotonic` after which nothing is tried any more. Silence of S3 may outlast it by
                `SHORTEST_TIMEOUT_SECONDS`.

        Raises:
            StoreKeyMissing: S3 says that there is no such object.
            StoreError: failed for another reason that stays, as often as allowed, or up to the deadline.
        """
        failure: Exception | None = None
        for attempt in range(1, self._attempts + 1):
            connection = _connection(self._timeout(deadline))
            try:
                check_deadline(deadline)
                return call(connection.client)
            except FAILURES as error:
                if failure is None or not isinstance(error, TimeoutError):  # of which the one before is the reason
                    failure = error
            if error_code(failure) in _MISSING_CODES:
                raise StoreKeyMissing(f"There is no {location}.") from failure
            message = f"Could not {verb} {location}: {failure}."
            if deadline is not None and time.monotonic() > deadline:
                raise StoreError(f"{message} The time for it is over, after {attempt} of {self._attempts} attempts.") from failure
            if error_code(failure) in _EXPIRED_CODES:
                _renew(connection, message)
            elif not _passes(failure):
                raise StoreError(message) from failure
            if attempt < self._attempts:
                _pause(attempt, deadline)
        raise StoreError(f"{message} It was tried {self._attempts} times.") from failure

    def _timeout(self, deadline: float | None) -> float:
        """Halved until it ends before the deadline. (Few values, for each of them has a client of its own.)"""
        timeout = self._read_timeout
        if deadline is not None:
            left = deadline - time.monotonic()
            while timeout > max(left, SHORTEST_TIMEOUT_SECONDS):
                timeout /= 2
        return timeout


def error_code(error: BaseException | None) -> str:
    """S3's name of an error, or "" when it is none of S3's."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def _passes(error: Exception) -> bool:
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or status == 429 or error_code(error) in PASSING_CODES
    return isinstance(error, _PASSING)


def _pause(attempt: int, deadline: float | None) -> None:
    """Between none and twice as long as the time before: ranks that failed together do not come back together."""
    seconds = random.uniform(0, min(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1), LONGEST_PAUSE_SECONDS))
    if deadline is not None:
        seconds = min(seconds, max(0.0, deadline - time.monotonic()))
    time.sleep(seconds)


@dataclass(frozen=True)
class _Connection:
    client: S3Client
    keys: tuple[str, ...]
    """The credentials that it began with: access key and token."""
    origin: str
    """Where they are from, in botocore's words."""


_connections: dict[tuple[str | None, float], _Connection] = {}
_lock = threading.Lock()


def _forget_connections() -> None:
    global _lock
    _connections.clear()
    _lock = threading.Lock()  # another thread of the parent may have held it


# boto3's clients do not survive a fork: parent and child would read from the same sockets.
os.register_at_fork(after_in_child=_forget_connections)


def _connection(read_timeout_seconds: float) -> _Connection:
    """One client per process, endpoint and time-out."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    with _lock:
        key = (endpoint, read_timeout_seconds)
        if key not in _connections:
            _connections[key] = _connect(endpoint, read_timeout_seconds)
        return _connections[key]


def _connect(endpoint: str | None, read_timeout_seconds: float) -> _Connection:
    session = _session()
    client = session.client(
        "s3",
        config=Config(
            connect_timeout=CONNECT_TIMEOUT_SECONDS,
            read_timeout=read_timeout_seconds,
            retries={"total_max_attempts": 1},  # `Requests` makes them
            max_pool_connections=64,
            tcp_keepalive=True,
            s3={
                # the checksum protects bodies, and a second digest of each would double what a write costs
                "payload_signing_enabled": False,
                # a server on an address or a name that has no wildcard DNS needs the bucket in the path
                **({"addressing_style": "path"} if endpoint else {}),
            },
        ),
    )
    return _Connection(client, *_credentials_of(session))


def _session() -> boto3.session.Session:
    session = botocore.session.Session()
    # By default botocore asks a host for its role once, for a second, and then says that there are no credentials: too little
    # where all ranks of a host ask as they start.
    session.set_config_variable("metadata_service_num_attempts", METADATA_ATTEMPTS)
    return boto3.session.Session(botocore_session=session)


def _credentials_of(session: Any) -> tuple[tuple[str, ...], str]:
    credentials = session.get_credentials()
    if credentials is None:
        return (), ""
    frozen = credentials.get_frozen_credentials()
    return (str(frozen.access_key), str(frozen.token)), credentials.method


def _renew(old: _Connection, message: str) -> None:
    """Ask all providers of credentials again, by a new client.

    Raises:
        StoreError: they gave the same ones, and will for ever.
    """
    with _lock:
        for key in [key for key, connection in _connections.items() if connection.keys == old.keys]:
            del _connections[key]
    keys, origin = _credentials_of(_session())
    if keys == old.keys and origin in ("env", "explicit"):
        raise StoreError(
            f"{message} The credentials of the access key {keys[0]} have expired, and as they are from the environment "
            "(AWS_ACCESS_KEY_ID), nothing renews them. Start with new ones, or use a role or a profile."
        )
