"""A deploy that waits for its nodes: complete after their checks, and rolled back with the failed step in the stack's event."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import boto3
import pytest

import trainlocal

ROOT = Path(__file__).parents[2]
CDK = Path(sys.prefix, "cdk/node_modules/.bin/cdk")
STACK = "TrainingClusterStack"
SETTINGS = """
run: ready
instance_type: c7i.2xlarge
nodes: 1
source: project
entry_point: train.py
on_success: keep
termination_hook: false
readiness_minutes: 1
"""


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/train.py").write_text("print('trained')\n")
    (tmp_path / "cluster.yaml").write_text(SETTINGS)
    return tmp_path / "cluster.yaml"


def test_a_deploy_waits_for_the_checks_and_tells_the_step_that_failed(settings, tmp_path) -> None:
    with trainlocal.start(tmp_path / "local") as local:
        imports = os.pathsep.join(str(ROOT / folder) for folder in ("constructs", "training", "local", "."))
        environment = {**os.environ, **local.environment(), "PYTHONPATH": imports}

        def cdk(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [str(CDK), *arguments]
            return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)

        def deploy(*changes: str) -> subprocess.CompletedProcess[str]:
            app = ("-c", f"settings={settings}", *(part for change in changes for part in ("-c", change)))
            return cdk("deploy", "--all", "--require-approval", "never", "--output", str(tmp_path / "out"), *app)

        formation = boto3.client("cloudformation", endpoint_url=local.endpoint)

        def events() -> list[tuple[str, str, str]]:
            found = formation.get_paginator("describe_stack_events").paginate(StackName=STACK)
            return [
                (event["LogicalResourceId"], event["ResourceStatus"], event.get("ResourceStatusReason", ""))
                for page in found
                for event in page["StackEvents"]
            ]

        assert cdk("bootstrap", "aws://123456789012/us-east-1", "--app", "").returncode == 0
        done = deploy("readiness=wait-condition")
        assert done.returncode == 0, done.stdout + done.stderr
        s3 = boto3.client("s3", endpoint_url=local.endpoint)
        (bucket,) = [one["Name"] for one in s3.list_buckets()["Buckets"] if "checkpoints" in one["Name"]]
        (key,) = [one["Key"] for one in s3.list_objects_v2(Bucket=bucket, Prefix="ready/nodes/")["Contents"]]
        lines = [json.loads(line) for line in s3.get_object(Bucket=bucket, Key=key)["Body"].read().splitlines()]
        assert [line["detail"] for line in lines if line["step"] == "ready"] == ["the stack's wait condition was sent SUCCESS"]
        assert [name for name, status, _ in events() if "Ready" in name and status == "CREATE_COMPLETE"]

        # Nodes that have no GPU here do not pass their checks.
        failed = deploy("readiness=signal", "instance_type=g4dn.xlarge")
        assert failed.returncode != 0
        assert formation.describe_stacks(StackName=STACK)["Stacks"][0]["StackStatus"] == "UPDATE_ROLLBACK_COMPLETE"
        signals = [reason for _, _, reason in events() if reason.startswith("Received FAILURE signal with UniqueId i-")]
        assert signals and signals[-1].endswith("/check")
        assert any("Received 1 FAILURE signal(s) out of 1" in reason for _, _, reason in events())

        # The other way says the reason itself.
        failed = deploy("readiness=wait-condition", "instance_type=g4dn.xlarge")
        assert failed.returncode != 0
        (said,) = [reason for _, _, reason in events() if reason.startswith("WaitCondition received failed message: 'check: ")]
        assert "GPU" in said or "nvidia" in said
