"""Answers to requests that neither moto nor this package can serve, in the protocol of the request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any
from xml.sax.saxutils import escape


def refuse(environ: dict[str, Any], start_response: Callable[..., Any], *, service: str, error: Exception) -> Iterable[bytes]:
    """Answers an action that is missing with 400, naming it (a 5xx would be retried for a minute), any other error with 500."""
    missing = isinstance(error, NotImplementedError)
    status, code = ("400 Bad Request", "NotEmulated") if missing else ("500 Internal Server Error", "InternalFailure")
    message = f"The emulated {service} lacks this: {error}" if missing else f"Fault in the emulated {service}: {error!r}"
    if environ.get("HTTP_X_AMZ_TARGET") or "json" in environ.get("CONTENT_TYPE", ""):
        kind, body = "application/json", json.dumps({"__type": code, "message": message})
    else:
        described = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
        errors = f"<Errors>{described}</Errors>" if service == "ec2" else described
        kind, body = "text/xml", f"<ErrorResponse>{errors}<RequestId>none</RequestId></ErrorResponse>"
    content = body.encode()
    start_response(status, [("Content-Type", kind), ("Content-Length", str(len(content)))])
    return [content]
