"""A job under mpirun from the settings to the nodes: real user data, isolated nodes, a real Open MPI, a real power cut."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import boto3
import pytest

import trainlocal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
CDK = Path(sys.prefix, "cdk/node_modules/.bin/cdk")
SETTINGS = """
run: by-mpirun
instance_type: c7i.large
nodes: 2
min_nodes: 1
source: project
entry_point: ./run.sh
launcher: mpirun
arguments: ["--steps=400", "--checkpoint.every_steps=10"]
environment: {OMP_NUM_THREADS: "1", COLOUR: "deep blue"}
publish_seconds: 1
timeouts: {peer_lost: 5, stop_grace: 30}
training:
  batch_tokens: 2048
  sequence_length: 128
  model: {layers: 1, width: 32, heads: 2}
"""
PROGRAM = """#!/bin/sh
# What every rank runs: a program of the project, which is no Python and knows Open MPI's variables and the job's.
set -e
echo "rank $OMPI_COMM_WORLD_RANK=$RANK of $OMPI_COMM_WORLD_SIZE=$WORLD_SIZE, $COLOUR, $(basename "$PWD"), $MASTER_ADDR"
python=/opt/pytorch/bin/python
"$python" mpi_sum.py
data="$(mktemp -d)"
"$python" -m trainrun tokens "$(dirname "$PWD")/trainrun/data" --glob '*.py' --out "$data/tokens" >&2
exec "$python" -m trainrun.pretrain "--data=$data/tokens" "$@"
"""


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/run.sh").write_text(PROGRAM)
    (tmp_path / "project/run.sh").chmod(0o755)
    shutil.copy(ROOT / "tests/mpi_sum.py", tmp_path / "project")
    (tmp_path / "cluster.yaml").write_text(SETTINGS)
    return tmp_path / "cluster.yaml"


def test_ela_05_a_program_under_mpirun_trains_on_after_a_power_cut(settings, tmp_path) -> None:
    with trainlocal.start(tmp_path / "local") as local:
        if local.tier == "plain":
            pytest.skip("plain nodes have loopback alone, which Open MPI 5 does not do with")
        imports = os.pathsep.join(str(ROOT / folder) for folder in ("constructs", "training", "local", "."))
        environment = {**os.environ, **local.environment(), "PYTHONPATH": imports}
        app = ("-c", f"settings={settings}", "--output", str(tmp_path / "out"))
        for command in (
            ["bootstrap", "aws://123456789012/us-east-1", "--app", ""],
            ["deploy", "--all", "--require-approval", "never", *app],
        ):
            done = subprocess.run(
                [str(CDK), *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
        s3 = boto3.client("s3", endpoint_url=local.endpoint)
        (bucket,) = [one["Name"] for one in s3.list_buckets()["Buckets"] if "checkpoints" in one["Name"]]
        run = Run(s3, bucket, local)

        run.wait_for(lambda: run.commits() and "rank 1=1 of 2=2" in run.said(), "two ranks have saved")
        assert "rank 0=0 of 2=2, deep blue, project, 10.0." in run.said()
        assert {"MPI: rank 0 of 2, sum 21", "MPI: rank 1 of 2, sum 21"} <= set(run.said().splitlines())
        (host,) = {line.rpartition(" ")[2] for line in run.said().splitlines() if line.startswith("rank ")}
        (lost,) = [node for node in local.nodes() if node.address != host]
        local.kill(lost.instance_id)
        cut = time.monotonic()
        run.wait_for(lambda: run.said().count("rank 1=1 of 2=2") == 2, "the replacement trains")
        print(f"\nwith the replacement {time.monotonic() - cut:.1f} s after the power cut")
        run.wait_for(run.result, "the run ends")
        result = json.loads(run.result())
        assert (result["state"], result["step"]) == ("succeeded", 400)
        checks = [event["detail"] for event in run.events() if (event["step"], event["state"]) == ("check", "done")]
        assert len(checks) == 3 and all("Open MPI 5" in detail and "no torch needed" in detail for detail in checks)


class Run:
    """What the run has put into its bucket, and its ranks into their logs."""

    def __init__(self, s3, bucket: str, local: trainlocal.Local) -> None:
        self._s3, self._bucket, self._local = s3, bucket, local

    def said(self) -> str:
        """What all ranks have said of themselves."""
        logs = [log for node in self._local.nodes() for log in node.logs.glob("traincluster/ranks/*/attempt_0/0/stdout.log")]
        return "\n".join(line for log in logs for line in log.read_text().splitlines() if line.startswith(("rank ", "MPI: ")))

    def commits(self) -> list[str]:
        return [key for key in self._keys() if key.endswith("COMMIT.json")]

    def result(self) -> str:
        return "".join(self._read(key) for key in self._keys() if key.endswith("/result.json"))

    def events(self) -> list[dict]:
        return [json.loads(line) for key in self._keys() if "/nodes/" in key for line in self._read(key).splitlines()]

    def wait_for(self, condition, what: str, *, seconds: float = 400.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            told = "\n".join(f"{event['node']} {event['step']} {event['state']} {event['detail']}" for event in self.events())
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s.\n{told}\n{self.said()}"
            time.sleep(0.5)

    def _keys(self) -> list[str]:
        return [item["Key"] for item in self._s3.list_objects_v2(Bucket=self._bucket).get("Contents", [])]

    def _read(self, key: str) -> str:
        return self._s3.get_object(Bucket=self._bucket, Key=key)["Body"].read().decode()
