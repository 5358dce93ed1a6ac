"""What a URL of a wait condition's handle takes, as S3 takes it for CloudFormation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from trainlocal.cloud.formation.account import StackAccount
from trainlocal.cloud.signals import Signal

_FIELDS = ("Status", "UniqueId", "Data", "Reason")


def serve_handle(account: StackAccount, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answers one request to a handle's URL."""
    status, text = _take(account, environ)
    start_response(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(text)))])
    return [text]


def _take(account: StackAccount, environ: dict[str, Any]) -> tuple[str, bytes]:
    if environ["REQUEST_METHOD"] != "PUT":
        return "403 Forbidden", b"SignatureDoesNotMatch: the URL is signed for PUT"
    if environ.get("CONTENT_TYPE"):
        return "403 Forbidden", b"SignatureDoesNotMatch: the URL is signed for an empty Content-Type"
    try:
        message = json.loads(environ["wsgi.input"].read())
        status, unique_id, data, reason = (message[name] for name in _FIELDS)
    except (ValueError, KeyError, TypeError) as error:
        return "400 Bad Request", f"not the JSON of a signal: {error!r}".encode()
    if status not in ("SUCCESS", "FAILURE") or not unique_id:
        return "400 Bad Request", b"Status must be SUCCESS or FAILURE, and UniqueId not empty"
    signal = Signal(unique_id=unique_id, succeeded=status == "SUCCESS", reason=reason, data=data)
    if not account.signal_handle(f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}", signal):
        return "403 Forbidden", b"SignatureDoesNotMatch: there is no such handle"
    return "200 OK", b""
