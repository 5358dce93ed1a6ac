"""An emulated account for all examples, and the real cdk CLI that deploys to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainlocal.environment import ACCOUNT, REGION, cdk_environment, cloud_environment

ROOT = Path(__file__).parents[2]
IMPORTS = os.pathsep.join(str(ROOT / folder) for folder in ("constructs", "training", "local"))
CDK = Path(sys.prefix) / "bin" / "cdk"


@dataclass(frozen=True)
class Account:
    """The emulated account."""

    endpoint: str
    environment: dict[str, str]

    def cdk(self, *arguments: str | Path, cwd: Path) -> str:
        """Runs a command of the CLI to its end and returns what it printed."""
        command = [str(CDK), *map(str, arguments)]
        done = subprocess.run(command, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=240)
        printed = done.stdout + done.stderr
        assert done.returncode == 0, printed
        return printed

    def resources(self) -> dict[str, set[str]]:
        """Names of all that exists, by kind."""
        with urllib.request.urlopen(f"{self.endpoint}/_traincluster/resources", timeout=60) as answer:
            return {kind: set(names) for kind, names in json.load(answer).items() if names}


@pytest.fixture(scope="session")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    """A bootstrapped account; it ends with the pipe to its standard input."""
    directory = tmp_path_factory.mktemp("cloud")
    process = subprocess.Popen(
        [sys.executable, "-m", "trainlocal.cloud", "--directory", str(directory), "--die-with-stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": IMPORTS},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        endpoint = json.loads(process.stdout.readline())["endpoint"]
        environment = {
            **os.environ,
            **cloud_environment(endpoint),
            **cdk_environment(directory / "home"),
            "PYTHONPATH": IMPORTS,
        }
        made = Account(endpoint, environment)
        made.cdk("bootstrap", f"aws://{ACCOUNT}/{REGION}", "--app", "", cwd=directory)
        yield made
    finally:
        process.stdin.close()
        assert process.wait(timeout=30) == 0
