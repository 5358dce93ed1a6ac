"""One emulated cloud for all tests of this folder, as a process of its own, and a way to deploy small templates to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

LOCAL = Path(__file__).parents[3] / "local"

sys.path.insert(0, str(Path(__file__).parent))  # groups


@cache
def _client(endpoint: str, service: str, region: str) -> Any:
    session: Any = boto3.Session(aws_access_key_id="testing", aws_secret_access_key="testing", region_name=region)
    config = Config(connect_timeout=5, read_timeout=60, retries={"total_max_attempts": 1})
    return session.client(service, endpoint_url=endpoint, config=config)


@dataclass(frozen=True)
class Cloud:
    """The running cloud."""

    endpoint: str
    directory: Path

    def client(self, service: str, region: str = "us-east-1") -> Any:
        """A client that fails rather than waits."""
        return _client(self.endpoint, service, region)

    def resources(self, region: str = "us-east-1") -> dict[str, list[str]]:
        """The inventory of the account."""
        with urllib.request.urlopen(f"{self.endpoint}/_traincluster/resources?region={region}", timeout=60) as answer:
            listed: dict[str, list[str]] = json.load(answer)
        return listed


@dataclass(frozen=True)
class DeployedStack:
    """A stack of a test's own name."""

    cloud: Cloud
    name: str

    @property
    def _formation(self) -> Any:
        return self.cloud.client("cloudformation")

    def create(self, template: dict[str, Any], **options: Any) -> str:
        """Creates the stack and returns the status in which it ends."""
        self._formation.create_stack(**self._request(template, options))
        return self.settled()

    def update(self, template: dict[str, Any], **options: Any) -> str:
        """Updates the stack and returns the status in which it ends."""
        self._formation.update_stack(**self._request(template, options))
        return self.settled()

    def delete(self, **options: Any) -> None:
        """Deletes the stack."""
        self._formation.delete_stack(StackName=self.name, **options)

    def settled(self) -> str:
        """The status of the stack. Requests wait for the end of small deployments, so there is nothing to poll for."""
        status: str = self.described()["StackStatus"]
        assert not status.endswith("_IN_PROGRESS"), status
        return status

    def described(self) -> dict[str, Any]:
        """The stack as the API describes it."""
        described: dict[str, Any] = self._formation.describe_stacks(StackName=self.name)["Stacks"][0]
        return described

    def outputs(self) -> dict[str, str]:
        """The outputs by key."""
        return {output["OutputKey"]: output["OutputValue"] for output in self.described().get("Outputs", [])}

    def physical(self, logical: str) -> str:
        """The physical id of a resource."""
        answer = self._formation.describe_stack_resource(StackName=self.name, LogicalResourceId=logical)
        physical: str = answer["StackResourceDetail"]["PhysicalResourceId"]
        return physical

    def events(self, identifier: str | None = None) -> list[tuple[str, str]]:
        """(logical id, status) of every event, the oldest first."""
        pages = self._formation.get_paginator("describe_stack_events").paginate(StackName=identifier or self.name)
        events = [event for page in pages for event in page["StackEvents"]]
        return [(event["LogicalResourceId"], event["ResourceStatus"]) for event in reversed(events)]

    def reasons(self) -> str:
        """All reasons of failures, in one text."""
        events = self._formation.describe_stack_events(StackName=self.name)["StackEvents"]
        return "\n".join(event.get("ResourceStatusReason", "") for event in events if "FAILED" in event["ResourceStatus"])

    def _request(self, template: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        return {
            "StackName": self.name,
            "TemplateBody": json.dumps(template),
            "Capabilities": ["CAPABILITY_NAMED_IAM"],
            **options,
        }


def _start_cloud(directory: Path, *options: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """Starts a cloud that ends with the pipe to its standard input; returns the process and the line it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trainlocal.cloud", "--directory", str(directory), "--die-with-stdin", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(LOCAL)},
    )
    assert process.stdout is not None
    line: dict[str, Any] = json.loads(process.stdout.readline())
    return process, line


@pytest.fixture
def start_cloud() -> Callable[..., tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """Starts a cloud in a folder of the test's own choice."""
    return _start_cloud


@pytest.fixture(scope="session")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """The emulated cloud."""
    directory = tmp_path_factory.mktemp("cloud")
    process, line = _start_cloud(directory)
    try:
        yield Cloud(line["endpoint"], directory)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=20) == 0


@pytest.fixture
def own_cloud(tmp_path: Path) -> Iterator[Cloud]:
    """A cloud of the test's own, for tests that count what there is."""
    process, line = _start_cloud(tmp_path)
    try:
        yield Cloud(line["endpoint"], tmp_path)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=20) == 0


@pytest.fixture
def stack(cloud: Cloud) -> DeployedStack:
    """A name for a stack that no other test uses, with what can be done to it."""
    return DeployedStack(cloud, f"s{uuid.uuid4().hex[:12]}")


@pytest.fixture
def other_stack(cloud: Cloud) -> DeployedStack:
    """A second stack."""
    return DeployedStack(cloud, f"o{uuid.uuid4().hex[:12]}")
