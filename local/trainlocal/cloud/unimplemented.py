"""The answer to an action that neither moto nor this package has: an error that names it and that no client retries."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any
from xml.sax.saxutils import escape

CODE = "NotEmulated"


def refuse_unimplemented(
    environ: dict[str, Any], start_response: Callable[..., Any], *, service: str, reason: str
) -> Iterable[bytes]:
    """Answers with status 400 (a 5xx would be retried for a minute) in the protocol of the request."""
    message = f"The emulated {service} lacks this: {reason}"
    target = environ.get("HTTP_X_AMZ_TARGET")
    if target or "json" in environ.get("CONTENT_TYPE", ""):
        kind, body = "application/json", json.dumps({"__type": CODE, "message": message})
    else:
        error = f"<Error><Code>{CODE}</Code><Message>{escape(message)}</Message></Error>"
        errors = f"<Errors>{error}</Errors>" if service == "ec2" else error
        kind, body = "text/xml", f"<ErrorResponse>{errors}<RequestId>none</RequestId></ErrorResponse>"
    content = body.encode()
    start_response("400 Bad Request", [("Content-Type", kind), ("Content-Length", str(len(content)))])
    return [content]
