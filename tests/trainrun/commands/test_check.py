"""``trainrun check`` by hand: on a machine of nobody's, and where there is a node's document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainrun.spec import ClusterSpec, JobSpec, RunSpec, StorageSpec

TRAINING = Path(__file__).resolve().parents[3] / "training"


@pytest.fixture
def check(tmp_path):
    """check(*arguments): runs the command with a root of its own; its exit code, results by name, and the process."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(TRAINING), "TRAINCLUSTER_ROOT": str(tmp_path / "root")}

    def run(*arguments, **variables):
        command = [sys.executable, "-m", "trainrun", "check", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env={**environment, **variables}, capture_output=True, text=True, timeout=120, check=False
        )
        results = json.loads(done.stdout) if "--json" in arguments and done.stdout else {"checks": []}
        return done, {one["name"]: one for one in results["checks"]}

    return run


def document(tmp_path, **job):
    return RunSpec(
        run="r",
        region="us-east-1",
        cluster=ClusterSpec(name="c", instance_type="c7i.large", nodes_min=1, nodes_desired=1, nodes_max=1),
        job=JobSpec(**{"entry_point": "train.py", "python": sys.executable, **job}),
        storage=StorageSpec(location=str(tmp_path / "runs")),
    ).to_json()


def test_without_a_document_it_tells_what_is_there(check, tmp_path):
    done, results = check("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert results["torch"]["found"].startswith("torch 2.")
    assert f"disk {tmp_path}" in results and "clock" in results and "store" not in results


def test_without_metadata_for_aws_clients_outside_a_node():
    code = """
import argparse, os, sys
from unittest import mock
from trainrun.commands import check
from trainrun.node.checks.runner import Checked
with mock.patch.object(check, "check_machine", lambda _: [Checked(name="none", seconds=0.0)]):
    check.act(argparse.Namespace(spec=None, json=False))
assert os.environ["AWS_EC2_METADATA_DISABLED"] == "true"
assert "boto3" not in sys.modules
"""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(TRAINING), "TRAINCLUSTER_ROOT": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_nodes_own_document_is_taken(check, tmp_path):
    for folder in ("etc/traincluster", "var/lib/traincluster"):
        (tmp_path / "root" / folder).mkdir(parents=True)
    (tmp_path / "root/etc/traincluster/run.json").write_text(document(tmp_path))
    done, _ = check()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith("ok   ") for line in lines)
    assert any("runs/r can be written" in line for line in lines)


def test_what_fails_is_told_and_the_exit_code_is_1(check, tmp_path):
    (tmp_path / "run.json").write_text(document(tmp_path, python="/nonexistent/python"))
    done, results = check("--spec", "run.json", "--json")
    assert done.returncode == 1
    assert "/nonexistent/python cannot be run" in results["torch"]["fault"]
    assert "cannot be written" in results["state folder"]["fault"]
    assert not results["store"]["fault"]


def test_a_document_that_is_none_is_a_sentence(check, tmp_path):
    (tmp_path / "run.json").write_text("{")
    done, _ = check("--spec", "run.json")
    assert done.returncode == 1 and done.stderr.startswith("trainrun: The run specification is not JSON")
    done, _ = check("--spec", "none.json")
    assert done.returncode == 1 and "none.json" in done.stderr and "Traceback" not in done.stderr
