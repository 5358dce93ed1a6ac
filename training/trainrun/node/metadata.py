"""The instance metadata service, version 2 only.

Standard library only, and no proxy. There is no fall-back to version 1 (requests without a token): nodes require
version 2, and a client that falls back turns an error into a silent "no notice" (field case ELA-09).
"""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

DEFAULT_ENDPOINT = "http://169.254.169.254"
TOKEN_SECONDS = 21600
"""Lifetime asked for: the longest that the service gives (EC2 User Guide, "Use the Instance Metadata Service")."""
PIECE_BYTES = 65536


class MetadataError(Exception):
    """The metadata service did not answer as documented, for as long as was tried."""


class Metadata:
    """A client that survives what the service does on a bad day: expired tokens, errors, silence."""

    def __init__(self, *, timeout: float = 2.0, attempts: int = 4, pause: float = 0.25) -> None:
        """The endpoint is $AWS_EC2_METADATA_SERVICE_ENDPOINT, or http://169.254.169.254.

        Args:
            timeout: seconds for one request.
            attempts: tries of one request before it counts as failed; a refused token does not use one up.
            pause: seconds before the second try, doubled for each further one.

        Raises:
            MetadataError: AWS_EC2_METADATA_DISABLED=true, so this is not a node, or must not be taken for one.
        """
        if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
            raise MetadataError(
                "AWS_EC2_METADATA_DISABLED is true, so the instance metadata service must not be asked. "
                "The node agent runs on nodes only; there, leave this variable unset."
            )
        self._endpoint = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "").rstrip("/") or DEFAULT_ENDPOINT
        self._timeout = timeout
        self._attempts = attempts
        self._pause = pause
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._token = ""
        self._token_expires = 0.0

    def get(self, path: str) -> str | None:
        """The text at ``latest/meta-data/<path>``, or None where the service has no such item (404).

        Raises:
            MetadataError: no proper answer after all attempts.
        """
        problem = ""
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(self._pause * 2 ** (attempt - 1))
            try:
                return self._get_once(path)
            except (OSError, ValueError, http.client.HTTPException) as error:  # HTTPError and time-outs are OSErrors
                problem = f"{type(error).__name__}: {error}"
        raise MetadataError(
            f"{self._endpoint}/latest/meta-data/{path} gave no proper answer in {self._attempts} attempts ({problem}). "
            "Is the instance metadata service enabled on this instance, with version 2 allowed?"
        )

    def require(self, path: str) -> str:
        """Like `get`, for items that every instance has.

        Raises:
            MetadataError: no proper answer, or no such item.
        """
        value = self.get(path)
        if value is None:
            raise MetadataError(f"{self._endpoint} has no {path}, which every EC2 instance has. Is this an EC2 instance?")
        return value

    def _get_once(self, path: str) -> str | None:
        try:
            return self._fetch(path)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            if error.code != 401:
                raise
        self._token = ""  # 401: expired, or forgotten by a service that restarted
        try:
            return self._fetch(path)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def _fetch(self, path: str) -> str:
        if not self._token or time.monotonic() > self._token_expires:
            self._token = self._request("PUT", "api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)})
            self._token_expires = time.monotonic() + TOKEN_SECONDS * 0.9
        return self._request("GET", f"meta-data/{path}", {"X-aws-ec2-metadata-token": self._token})

    def _request(self, method: str, path: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(f"{self._endpoint}/latest/{path}", method=method, headers=headers)
        deadline = time.monotonic() + self._timeout
        text = b""
        with self._opener.open(request, timeout=self._timeout) as response:
            while piece := response.read1(PIECE_BYTES):
                text += piece
                if time.monotonic() > deadline:  # the time-out is for each piece, and an answer may come in very small ones
                    raise TimeoutError(f"the answer was not whole after {self._timeout:g} s")
            if (length := response.headers["Content-Length"]) is not None and len(text) < int(length):
                raise http.client.IncompleteRead(text, int(length) - len(text))
        return text.decode()


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who this node is."""

    node: str
    """Instance id."""
    address: str
    """Private IPv4 address."""


def identify(metadata: Metadata) -> Identity:
    """Ask who this node is.

    Raises:
        MetadataError: no proper answer.
    """
    return Identity(node=metadata.require("instance-id"), address=metadata.require("local-ipv4"))
