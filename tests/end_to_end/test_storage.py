"""Storage from the settings to the nodes: the real CLI, real user data; folders stand in for disks and file systems."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import boto3
import pytest

import trainlocal

ROOT = Path(__file__).parents[2]
CDK = Path(sys.prefix, "cdk/node_modules/.bin/cdk")
MOUNTS = ("/fsx", "/data", "/efs", "/scratch")
SETTINGS = """
run: storage
instance_type: c6id.2xlarge
nodes: 2
source: project
entry_point: train.py
on_success: keep
publish_seconds: 2
instance_store: /scratch
volumes:
  - {size_gib: 100, path: /data}
lustre: {capacity_gib: 1200}
efs: {path: /efs}
"""
JOB = f"""
import json, os, pathlib, time
import boto3
import torch.distributed as dist

dist.init_process_group("gloo")
rank, root = dist.get_rank(), pathlib.Path(os.environ.get("TRAINCLUSTER_ROOT") or "/")
folders = {{path: root / path.lstrip("/") for path in {MOUNTS!r}}}
for folder in folders.values():
    (folder / f"rank-{{rank}}").touch()
dist.barrier()
seen = {{path: sorted(os.listdir(folder)) for path, folder in folders.items()}}
location = json.loads(pathlib.Path(os.environ["TRAINRUN_SPEC"]).read_text())["storage"]["location"]
boto3.client("s3").put_object(Bucket=location.removeprefix("s3://"), Key=f"storage/seen-{{rank}}", Body=json.dumps(seen))
dist.destroy_process_group()
"""


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/train.py").write_text(JOB)
    (tmp_path / "cluster.yaml").write_text(SETTINGS)
    return tmp_path / "cluster.yaml"


def test_nodes_mount_what_the_settings_say_and_the_destroy_leaves_what_it_said(settings, tmp_path) -> None:
    with trainlocal.start(tmp_path / "local") as local:
        imports = os.pathsep.join(str(ROOT / folder) for folder in ("constructs", "training", "local", "."))
        environment = {**os.environ, **local.environment(), "PYTHONPATH": imports}

        def cdk(*arguments: str) -> str:
            command = [str(CDK), *arguments]
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout + done.stderr

        app = ("-c", f"settings={settings}", "--output", str(tmp_path / "out"))
        cdk("bootstrap", "aws://123456789012/us-east-1", "--app", "")
        told = cdk("deploy", "--all", "--require-approval", "never", *app)
        assert "stays when its stack is destroyed" in told
        s3 = boto3.client("s3", endpoint_url=local.endpoint)
        (bucket,) = [one["Name"] for one in s3.list_buckets()["Buckets"] if "checkpoints" in one["Name"]]

        def read(key: str) -> str:
            return s3.get_object(Bucket=bucket, Key=key)["Body"].read().decode()

        deadline = time.monotonic() + 150
        while not (found := [key for key in keys_of(s3, bucket) if key.endswith("result.json")]):
            assert time.monotonic() < deadline, [read(key) for key in keys_of(s3, bucket) if key.endswith(".jsonl")]
            time.sleep(0.5)
        assert json.loads(read(found[0]))["state"] == "succeeded"
        check_what_was_seen([json.loads(read(f"storage/seen-{rank}")) for rank in (0, 1)], isolated=local.tier != "plain")
        events = [json.loads(line) for key in keys_of(s3, bucket) if "/nodes/" in key for line in read(key).splitlines()]
        prepared = [event["detail"] for event in events if (event["step"], event["state"]) == ("prepare", "done")]
        assert len(prepared) == 2 and all("stands in for" in detail for detail in prepared)
        parts = [re.findall(r"(?:^|; )([^;:]+?) \d+\.\d\d s: ", detail) for detail in prepared]  # each with its seconds
        assert all(names[:2] == ["folders", "limits"] and names[-1] == "CloudWatch agent" for names in parts)
        if local.tier != "plain":
            assert all("mount /fsx" in names and "clock" not in names for names in parts)  # the clock is this machine's

        cdk("destroy", "--all", "--force", *app)
        left = json.load(urllib.request.urlopen(f"{local.endpoint}/_traincluster/resources", timeout=60))
        assert len(left["AWS::EFS::FileSystem"]) == 1 and "AWS::FSx::FileSystem" not in left
        assert not [kind for kind in left if kind.startswith("AWS::EC2::")]


def keys_of(s3, bucket: str) -> list[str]:
    return [item["Key"] for item in s3.list_objects_v2(Bucket=bucket).get("Contents", [])]


def check_what_was_seen(seen: list[dict[str, list[str]]], *, isolated: bool) -> None:
    """Shared file systems show both ranks' files to both, a node's own disks only its own. (Plain nodes share nothing.)"""
    for rank, one in enumerate(seen):
        for path in MOUNTS:
            shared = isolated and path in ("/fsx", "/efs")
            assert one[path] == (["rank-0", "rank-1"] if shared else [f"rank-{rank}"])
