"""Where a template comes from: the request itself, or an object in the emulated S3."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote, urlsplit

from botocore.exceptions import ClientError

from trainlocal.cloud.clients import Clients
from trainlocal.cloud.formation.faults import FormationError
from trainlocal.cloud.formation.template import Template, read_template

_VIRTUAL_HOST = re.compile(r"(?P<bucket>[a-z0-9.-]+)\.s3[.-]([a-z0-9-]+\.)*(amazonaws\.com(\.cn)?|localhost)")
BODY_BYTES = 51_200
"""The most that a TemplateBody may have; CloudFormation quotas."""
OBJECT_BYTES = 1_048_576
"""The most that a template object in S3 may have; CloudFormation quotas."""


def requested_template(clients: Clients, region: str, params: dict[str, Any], previous: Template | None) -> Template:
    """The template that a request names by TemplateBody, TemplateURL or UsePreviousTemplate."""
    if params.get("TemplateBody"):
        body: str = params["TemplateBody"]
        if len(body.encode()) > BODY_BYTES:
            raise FormationError(f"TemplateBody has {len(body.encode())} bytes; the most is {BODY_BYTES}. Use TemplateURL.")
        return read_template(body)
    if params.get("TemplateURL"):
        return read_template(_fetch(clients, region, params["TemplateURL"]))
    if params.get("UsePreviousTemplate") and previous is not None:
        return previous
    raise FormationError("Either Template URL or Template Body must be specified.")


def bucket_and_key(url: str) -> tuple[str, str]:
    """Bucket and key of an S3 address, path-style (as on any loopback endpoint) or with the bucket in the host name."""
    parts = urlsplit(url)
    path = unquote(parts.path).lstrip("/")
    if match := _VIRTUAL_HOST.fullmatch(parts.hostname or ""):
        return match["bucket"], path
    bucket, _, key = path.partition("/")
    if not bucket or not key:
        raise FormationError(f"TemplateURL must reference a valid S3 object to which you have access, not {url}")
    return bucket, key


def _fetch(clients: Clients, region: str, url: str) -> str:
    bucket, key = bucket_and_key(url)
    try:
        content: bytes = clients.client("s3", region).get_object(Bucket=bucket, Key=key)["Body"].read()
    except ClientError as error:
        raise FormationError(f"TemplateURL {url} cannot be read: {error}") from error
    if len(content) > OBJECT_BYTES:
        raise FormationError(f"The template at {url} has {len(content)} bytes; the most is {OBJECT_BYTES}.")
    return content.decode()
