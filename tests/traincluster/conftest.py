"""What the tests of the construct library share: synthesis in this process, once per distinct input."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest
from aws_cdk.assertions import Template

from traincluster import CheckpointBucket, TrainingCluster, TrainingJob, TrainingNetwork

ANY_RANKS = 256 * 64 * 25 * 720_720
"""Tokens of an optimizer step whose sequences divide among the ranks of every cluster here."""

JOB = TrainingJob(run="test-run", configuration={"steps": 10, "batch_tokens": ANY_RANKS})

Resources = dict[str, dict[str, Any]]


class Synthesized:
    """A stack with one cluster in it, made into a template."""

    def __init__(self, outdir: Path, **arguments: Any) -> None:
        """Arguments are those of TrainingCluster; `network` is a mapping of TrainingNetwork's, `notify` makes a topic."""
        network = arguments.pop("network", {})
        settings = {"instance_type": "c7i.2xlarge", "nodes": 2, "job": JOB, **arguments}
        self.stack = cdk.Stack(cdk.App(context=flags(), outdir=str(outdir)), "Stack")
        self.bucket = CheckpointBucket(self.stack, "Checkpoints")
        if "notify" in settings:
            settings["notify"] = settings["notify"](self.stack)
        self.cluster = TrainingCluster(
            self.stack,
            "Cluster",
            network=TrainingNetwork(self.stack, "Network", **network),
            checkpoints=self.bucket,
            **settings,
        )

    @functools.cached_property
    def template(self) -> dict[str, Any]:
        template: dict[str, Any] = Template.from_stack(self.stack).to_json()
        return template

    def resources(self, kind: str) -> Resources:
        """The resources of a type, by logical id."""
        return {name: one for name, one in self.template["Resources"].items() if one["Type"] == kind}

    def only(self, kind: str) -> dict[str, Any]:
        """The one resource of a type."""
        (resource,) = self.resources(kind).values()
        return resource

    @property
    def launch_data(self) -> dict[str, Any]:
        data: dict[str, Any] = self.only("AWS::EC2::LaunchTemplate")["Properties"]["LaunchTemplateData"]
        return data

    @property
    def interfaces(self) -> list[dict[str, Any]]:
        interfaces: list[dict[str, Any]] = self.launch_data["NetworkInterfaces"]
        return interfaces

    @property
    def user_data(self) -> str:
        """The user data with a stand-in for each reference."""
        parts = self.launch_data["UserData"]["Fn::Base64"]["Fn::Join"][1]
        return "".join(part if isinstance(part, str) else "REFERENCE" for part in parts)

    @property
    def annotations(self) -> dict[str, list[str]]:
        """The messages that synth shows, by level."""
        found: dict[str, list[str]] = {"info": [], "warning": [], "error": []}
        for construct in self.stack.node.find_all():
            for entry in construct.node.metadata:
                level = entry.type.removeprefix("aws:cdk:")
                if level in found:
                    found[level].append(str(entry.data))
        return found


def flags() -> dict[str, Any]:
    """The feature flags of cdk.json, as the CLI hands them over."""
    context: dict[str, Any] = json.loads((Path(__file__).parents[2] / "cdk.json").read_text())["context"]
    return context


@pytest.fixture(scope="session")
def synthesize(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Synthesized]:
    """Makes a cluster of its own for one test."""
    return lambda **arguments: Synthesized(tmp_path_factory.mktemp("assembly"), **arguments)


@pytest.fixture(scope="session")
def cluster_of(synthesize: Callable[..., Synthesized]) -> Callable[[str], Synthesized]:
    """A synthesized default cluster of an instance type, made once for all tests."""
    return functools.lru_cache(maxsize=None)(lambda instance_type: synthesize(instance_type=instance_type))


@pytest.fixture
def stack(tmp_path: Path) -> cdk.Stack:
    """An empty stack."""
    return cdk.Stack(cdk.App(outdir=str(tmp_path / "assembly")), "Stack")


@pytest.fixture(scope="module")
def emulated_aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Endpoint of an emulated AWS of the module's own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trainlocal.cloud", "--directory", str(tmp_path_factory.mktemp("cloud")), "--die-with-stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "local")},
    )
    assert process.stdout is not None and process.stdin is not None
    yield json.loads(process.stdout.readline())["endpoint"]
    process.stdin.close()
    assert process.wait(timeout=20) == 0
