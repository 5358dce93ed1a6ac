"""What the fleet's tests share."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tests.isolation import LOOPBACK_ONLY, ORDINARY_USER, as_ordinary_user
from trainlocal.fleet.instances import Instance
from trainlocal.fleet.packages import PackagesMissing, image_layer
from trainlocal.fleet.tiers import TIERS, choose

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "local"


@pytest.fixture
def an_instance():
    """An instance as the account would describe it."""
    return Instance(
        id="i-0123456789abcdef0",
        address="10.0.17.5",
        type="c7i.large",
        image="ami-12345678",
        region="us-east-1",
        zone="us-east-1b",
        account="123456789012",
        mac="02:00:00:00:00:05",
        subnet="subnet-1",
        vpc="vpc-1",
        vpc_cidr="10.0.0.0/16",
        launched=datetime(2030, 1, 1, tzinfo=timezone.utc),
        role="node-role",
        user_data=b"#!/bin/bash\ntrue\n",
        security_groups=("nodes",),
        tags={"Name": "a node"},
    )


@dataclass(frozen=True)
class Runner:
    """Runs a program of these tests as the user that a tier is for; `directory` belongs to that user."""

    tier: str
    directory: Path
    command: list[str]

    def start(self, program, *arguments):
        """Start `program` (a file beside the tests) with the directory, the tier and more arguments."""
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(self.directory)}
        return subprocess.Popen(
            [*self.command, sys.executable, str(HERE / program), str(self.directory / "local"), self.tier, *arguments],
            cwd="/",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def where_only_loopback_exists(self):
        """The same in a network without any way out, where this process may make one (as root)."""
        return replace(self, command=[*LOOPBACK_ONLY, *self.command]) if os.geteuid() == 0 and sys.platform == "linux" else self

    def run(self, program, seconds):
        """Run `program` to its end; return what it printed as JSON."""
        process = self.start(program)
        try:
            output, errors = process.communicate(timeout=seconds)
        finally:
            process.kill()
        assert process.returncode == 0, errors
        return json.loads(output)


@pytest.fixture
def make_runner(tmp_path):
    """make_runner(tier) -> Runner; skips where the machine does not allow the tier."""
    scratch = Path(tempfile.mkdtemp(prefix="trainlocal-test-"))  # pytest's own folders are closed to other users

    def make(tier):
        root = os.geteuid() == 0
        if tier == "isolated-root" and not root:
            pytest.skip("only root can be root")
        if tier != "plain" and (reason := _hindrance()):
            pytest.skip(f"this machine does not allow isolated nodes: {reason}")
        if tier != "isolated-user" or not root:
            return Runner(tier, tmp_path, [])
        if shutil.which("setpriv") is None:
            pytest.skip("there is no setpriv here to become an ordinary user with")
        scratch.chmod(0o755)
        home = scratch / "home"
        home.mkdir()
        os.chown(home, ORDINARY_USER, ORDINARY_USER)
        return Runner(tier, home, as_ordinary_user(scratch))

    yield make
    shutil.rmtree(scratch)


@pytest.fixture(params=TIERS)
def runner(request, make_runner):
    """One for each tier that this machine allows."""
    return make_runner(request.param)


@pytest.fixture
def best_runner(make_runner):
    """The best tier that this machine allows to this user."""
    return make_runner(choose().tier)


def _hindrance():
    if sys.platform != "linux":
        return "it is not Linux"
    try:
        image_layer()
    except PackagesMissing as error:
        return str(error)
    choice = choose()
    return choice.reason if choice.tier == "plain" else ""
