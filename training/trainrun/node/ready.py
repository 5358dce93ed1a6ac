"""Tell CloudFormation that this node's checks have passed, or which step failed.

The stack waits for it only where the cluster's ``readiness`` says so. A word that does not arrive is no failure of the node:
the stack fails when its time is over, and the reason is in the node's events.
"""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPStatus

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from trainrun.spec import ReadinessSpec

UNIQUE_ID_LENGTH = 64
"""The longest UniqueId of cloudformation:SignalResource, which has no other field for words."""
REASON_LENGTH = 800
"""Of a reason sent to a wait condition: a stack's event shows about 1,000 characters."""
ATTEMPTS = 3
PAUSE_SECONDS = 5.0
TIMEOUT_SECONDS = 10.0

log = logging.getLogger(__name__)


class Readiness:
    """How one node speaks to the stack that made it."""

    def __init__(self, spec: ReadinessSpec, *, node: str, region: str, pause: Callable[[float], None] = time.sleep) -> None:
        """Args:
        spec: the way.
        node: instance id, which tells the nodes' words apart.
        region: the stack's.
        pause: sleeps between attempts.
        """
        self._spec, self._node, self._region, self._pause = spec, node, region, pause

    @property
    def is_awaited(self) -> bool:
        """Whether a stack may wait for this node's word."""
        return self._spec.way != "none"

    def passed(self, detail: str = "") -> str:
        """Say that the node is ready. Returns what became of it; raises nothing that a service does.

        Args:
            detail: what the stack's wait condition keeps of it.
        """
        return self._send(True, step="", text=detail)

    def failed(self, step: str, reason: str) -> str:
        """Say that the node is not fit. Returns as `passed`.

        Args:
            step: that failed: "prepare", "software", "check" or "bootstrap".
            reason: what was seen, what was expected and what to do.
        """
        return self._send(False, step=step, text=reason)

    def _send(self, succeeded: bool, *, step: str, text: str) -> str:
        if not self.is_awaited:
            return ""
        send = self._signal if self._spec.way == "signal" else self._put
        problem = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                self._pause(PAUSE_SECONDS)
            try:
                return send(succeeded, step, text)
            except (BotoCoreError, ClientError, OSError, ValueError) as error:  # urllib's errors are OSErrors
                problem = f"{type(error).__name__}: {error}"
                log.warning("CloudFormation has not taken this node's word: %s", problem)
        return f"CloudFormation did not take this node's word in {ATTEMPTS} attempts ({problem})"

    def _signal(self, succeeded: bool, step: str, text: str) -> str:
        config = Config(connect_timeout=5, read_timeout=TIMEOUT_SECONDS, retries={"mode": "standard", "total_max_attempts": 4})
        client = boto3.session.Session().client("cloudformation", region_name=self._region, config=config)
        unique_id = self._node if succeeded else f"{self._node}/{step}"[:UNIQUE_ID_LENGTH]
        try:
            client.signal_resource(
                StackName=self._spec.stack,
                LogicalResourceId=self._spec.resource,
                UniqueId=unique_id,
                Status="SUCCESS" if succeeded else "FAILURE",
            )
        except ClientError as error:
            if error.response["Error"]["Code"] != "ValidationError":
                raise
            return f"the stack {self._spec.stack} waits for no signal (any more)"  # made long ago, or rolled back
        return f"the stack {self._spec.stack} was sent {'SUCCESS' if succeeded else 'FAILURE'} as {unique_id}"

    def _put(self, succeeded: bool, step: str, text: str) -> str:
        """One request to the handle's URL, which is signed: no credentials, and no Content-Type."""
        reason = text if succeeded else f"{step}: {text}"
        message = {
            "Status": "SUCCESS" if succeeded else "FAILURE",
            "UniqueId": self._node,
            "Reason": shortened(reason or "The node's checks have passed.", REASON_LENGTH),
            "Data": shortened(text if succeeded else step, REASON_LENGTH),
        }
        request = urllib.request.Request(
            self._spec.url, data=json.dumps(message).encode(), headers={"Content-Type": ""}, method="PUT"
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
                return f"the stack's wait condition was sent {message['Status']}"
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.FORBIDDEN:
                raise
            return "the stack's wait condition takes no word (any more)"  # the URL is signed for a day


def shortened(text: str, length: int) -> str:
    """Text in one line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 4] + " ..."
