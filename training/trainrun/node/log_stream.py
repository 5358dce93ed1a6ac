"""The node's own stream in the cluster's CloudWatch log group."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import boto3
from botocore.config import Config

_CLIENT = Config(connect_timeout=5, read_timeout=10, retries={"mode": "standard", "total_max_attempts": 3})


class LogStream:
    """Appends lines to one stream, which it makes at the first line."""

    def __init__(self, *, group: str, name: str, region: str) -> None:
        """Args:
        group: name of the log group, which exists.
        name: name of the stream in it.
        region: the group's region.
        """
        self._group, self._name, self._region = group, name, region
        self._client: Any = None

    def append(self, lines: Sequence[tuple[float, str]]) -> None:
        """Append lines, each with its time in seconds since the epoch, in order of time.

        Raises:
            botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError: not taken, after the retries.
        """
        if not lines:
            return
        if self._client is None:
            client = boto3.client("logs", region_name=self._region, config=_CLIENT)
            with suppress(client.exceptions.ResourceAlreadyExistsException):  # made before the agent was started again
                client.create_log_stream(logGroupName=self._group, logStreamName=self._name)
            self._client = client
        events = [{"timestamp": int(seconds * 1000), "message": text} for seconds, text in lines]
        self._client.put_log_events(logGroupName=self._group, logStreamName=self._name, logEvents=events)
