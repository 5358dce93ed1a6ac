"""CloudFormation's own resources: wait conditions and their handles."""

from __future__ import annotations

import json
import secrets
from typing import Any

from trainlocal.cloud.resources.provider import Place, Provider, provides
from trainlocal.cloud.resources.schema import TEXT, WHOLE, record

HANDLE_PATH = "/_traincluster/wait-condition/"
"""Where the emulated account takes what S3 takes on AWS: nodes reach it as they reach the emulated S3."""
LONGEST_SECONDS = 43200


@provides
class WaitConditionHandle(Provider):
    """A URL by which anybody who knows it can signal. Its query stands for AWS's signature: without it nothing is taken."""

    type = "AWS::CloudFormation::WaitConditionHandle"
    schema = record()

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        url = f"{place.clients.endpoint}{HANDLE_PATH}{place.region}/{place.stack_name}/{place.logical}"
        return f"{url}?X-Amz-Expires=86399&X-Amz-Signature={secrets.token_hex(32)}"

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        """The URL dies with the stack's memory of it."""


@provides
class WaitCondition(Provider):
    """Waits for signals to its handle's URL."""

    type = "AWS::CloudFormation::WaitCondition"
    schema = record(Count=WHOLE, Handle=TEXT, Timeout=WHOLE, required="Handle Timeout")
    attributes = frozenset({"Data"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        if not 0 < properties["Timeout"] <= LONGEST_SECONDS:
            raise ValueError(f"Timeout is {properties['Timeout']}, which is not from 1 to {LONGEST_SECONDS} seconds")
        return f"{place.stack_id}/{place.logical}"

    def settle(self, place: Place, properties: dict[str, Any]) -> None:
        count = properties.get("Count", 1)
        received = place.signals.wait(properties["Handle"], count=count, seconds=properties["Timeout"])
        for signal in received:
            if not signal.succeeded:
                raise ValueError(f"WaitCondition received failed message: '{signal.reason}' for uniqueId: {signal.unique_id}")
        if len(received) < count:
            raise ValueError(f"WaitCondition timed out. Received {len(received)} conditions when expecting {count}")

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        raise ValueError("Update to resource type AWS::CloudFormation::WaitCondition is not supported.")

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        """There is nothing to remove."""

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return json.dumps({signal.unique_id: signal.data for signal in place.signals.received(properties["Handle"])})
