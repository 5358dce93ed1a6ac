"""The bootstrap, run for real by bash under a root of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from traincluster.payload import Payload, pack
from traincluster.user_data import render
from trainrun.directory import DirectoryStore
from trainrun.node.replacements import Replacements
from trainrun.spec import ClusterSpec, JobSpec, RunSpec, StorageSpec

AGENT = """
import json, os, sys
with open(os.environ["TRAINCLUSTER_ROOT"] + "/started", "a") as started:
    print(json.dumps([sys.argv[1:], __file__]), file=started)
sys.exit(int(os.environ.get("AGENT_STATUS", "0")))
"""

# Stands in for boto3: "downloads" from a folder, after as many failures, or torn, as the files `failures` and `torn` say.
BOTO3 = """
import datetime, os, pathlib, shutil
folder = pathlib.Path(os.environ["FAKE_S3"])
def one_less(name):
    left = int((folder / name).read_text()) if (folder / name).exists() else 0
    (folder / name).write_text(str(max(0, left - 1)))
    return left
class Client:
    def download_file(self, bucket, key, target):
        if one_less("failures"):
            raise ConnectionError("no route to S3 yet")
        shutil.copy(folder / bucket / key, target)
        if one_less("torn"):
            os.truncate(target, 100)
    def put_object(self, Bucket, Key, Body):
        path = folder / Bucket / Key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(Body)
    def get_paginator(self, name):
        return self
    def paginate(self, Bucket, Prefix):
        top = folder / Bucket
        found = [path for path in top.rglob("*.json") if str(path.relative_to(top)).startswith(Prefix)]
        when = datetime.datetime.fromtimestamp
        return [{"Contents": [{"Key": str(p.relative_to(top)), "LastModified": when(p.stat().st_mtime)} for p in found]}]
    def set_instance_health(self, **what):
        with (folder / "health").open("a") as file:
            print(what["InstanceId"], what["HealthStatus"], what["ShouldRespectGracePeriod"], file=file)
def client(service, region_name, config=None):
    assert service in ("s3", "autoscaling") and region_name == "us-east-1"
    return Client()
"""


class Machine:
    """A folder that stands for a node's file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {
            "PATH": os.environ["PATH"],
            "AWS_EC2_METADATA_DISABLED": "true",
            "TRAINCLUSTER_ROOT": str(root),
            "TRAINCLUSTER_PYTHON": sys.executable,
        }

    def boot(self, document: str, **environment: str) -> subprocess.CompletedProcess[str]:
        script = self.root / "user-data"
        script.write_text(document)
        return subprocess.run(
            ["bash", str(script)],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def payload(self) -> Path:
        return self.root / "opt/traincluster/payload"

    @property
    def starts(self) -> list[list[object]]:
        started = self.root / "started"
        return [json.loads(line) for line in started.read_text().splitlines()] if started.exists() else []

    def leftovers(self) -> list[Path]:
        return list((self.root / "opt/traincluster").glob("bootstrap.*"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    root = tmp_path / "root"
    root.mkdir()
    return Machine(root)


@pytest.fixture
def payload(tmp_path: Path) -> Payload:
    return payload_with(tmp_path / "package", AGENT)


def payload_with(folder: Path, agent: str) -> Payload:
    (folder / "node").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "node" / "__init__.py").write_text("")
    (folder / "node" / "__main__.py").write_text(agent)
    return pack(None, package=folder)


def spec_for(payload: Payload) -> RunSpec:
    return RunSpec(
        run="run",
        region="us-east-1",
        cluster=ClusterSpec(name="Stack/Cluster", instance_type="c7i.2xlarge", nodes_min=1, nodes_desired=1, nodes_max=1),
        job=JobSpec(entry_point="trainrun.pretrain", arguments=('it\'s $(false) "quoted"',)),
        storage=StorageSpec(location="s3://bucket"),
        payload_sha256=payload.sha256,
    )


def test_inline_payload_is_unpacked_and_the_agent_started(machine, payload):
    done = machine.boot(render(spec_for(payload), payload))
    assert done.returncode == 0, done.stderr
    assert RunSpec.from_json((machine.root / "etc/traincluster/run.json").read_text()) == spec_for(payload)
    assert machine.starts == [[["start"], str(machine.payload / "trainrun/node/__main__.py")]]
    assert (machine.root / "var/lib/traincluster").is_dir() and (machine.root / "var/log/traincluster").is_dir()
    assert machine.leftovers() == []


def test_a_payload_with_another_digest_is_not_unpacked(machine, payload):
    document = render(spec_for(payload), payload).replace(payload.sha256, "0" * 64)
    done = machine.boot(document)
    assert done.returncode != 0
    assert f"the payload has sha256 {payload.sha256}, not {'0' * 64}. Nothing of it was unpacked." in done.stderr
    assert "failed in step 'check and unpack the payload'" in done.stderr
    assert not machine.payload.exists()
    assert machine.starts == [] and machine.leftovers() == []


def test_a_damaged_archive_is_not_unpacked(machine, payload):
    document = render(spec_for(payload), payload)
    head, mark, rest = document.partition("<<'ARCHIVE'\n")
    damaged = head + mark + rest[:40] + ("A" if rest[40] != "A" else "B") + rest[41:]
    done = machine.boot(damaged)
    assert done.returncode != 0
    assert "Nothing of it was unpacked" in done.stderr
    assert not machine.payload.exists() and machine.starts == []


def test_running_again_keeps_what_is_there(machine, payload):
    document = render(spec_for(payload), payload)
    machine.boot(document)
    (machine.payload / "mark").write_text("still here")
    done = machine.boot(document)
    assert done.returncode == 0, done.stderr
    assert (machine.payload / "mark").exists()
    assert len(machine.starts) == 2


def test_another_payload_replaces_it_as_a_whole(machine, payload, tmp_path):
    machine.boot(render(spec_for(payload), payload))
    (machine.payload / "mark").write_text("old")
    newer = payload_with(tmp_path / "newer", AGENT + "# newer\n")
    done = machine.boot(render(spec_for(newer), newer))
    assert done.returncode == 0, done.stderr
    assert not (machine.payload / "mark").exists()
    assert (machine.payload / ".sha256").read_text() == newer.sha256


@pytest.fixture
def fake_s3(tmp_path: Path, payload: Payload) -> dict[str, str]:
    folder = tmp_path / "s3"
    (folder / "assets").mkdir(parents=True)
    (folder / "assets" / "payload.xz").write_bytes(payload.archive)
    (folder / "failures").write_text("0")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "boto3.py").write_text(BOTO3)
    return {"FAKE_S3": str(folder), "PYTHONPATH": str(tmp_path / "modules")}


def test_asset_is_fetched_again_until_s3_answers(machine, payload, fake_s3):
    Path(fake_s3["FAKE_S3"], "failures").write_text("1")
    done = machine.boot(render(spec_for(payload), payload, bucket="assets", key="payload.xz"), **fake_s3)
    assert done.returncode == 0, done.stderr
    assert "s3://assets/payload.xz: no route to S3 yet" in done.stderr
    assert len(machine.starts) == 1


def test_asset_that_was_tampered_with_is_not_unpacked(machine, payload, fake_s3):
    with Path(fake_s3["FAKE_S3"], "assets", "payload.xz").open("ab") as archive:
        archive.write(b"more")
    done = machine.boot(render(spec_for(payload), payload, bucket="assets", key="payload.xz"), **fake_s3)
    assert done.returncode != 0
    assert "Nothing of it was unpacked" in done.stderr
    assert not machine.payload.exists() and machine.starts == []


def test_asset_that_is_there_already_is_not_fetched_again(machine, payload, fake_s3):
    document = render(spec_for(payload), payload, bucket="assets", key="payload.xz")
    machine.boot(document, **fake_s3)
    Path(fake_s3["FAKE_S3"], "assets", "payload.xz").unlink()
    done = machine.boot(document, **fake_s3)
    assert done.returncode == 0, done.stderr
    assert len(machine.starts) == 2


def test_a_torn_download_is_fetched_again(machine, payload, fake_s3):
    Path(fake_s3["FAKE_S3"], "torn").write_text("2")
    done = machine.boot(render(spec_for(payload), payload, bucket="assets", key="payload.xz"), **fake_s3)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Nothing of it was unpacked") == 2
    assert len(machine.starts) == 1 and machine.leftovers() == []


def test_an_image_without_boto3_is_told_at_once(machine, payload, tmp_path):
    (tmp_path / "boto3.py").write_text("raise ImportError('No module named boto3')")
    started = time.monotonic()
    done = machine.boot(render(spec_for(payload), payload, bucket="assets", key="payload.xz"), PYTHONPATH=str(tmp_path))
    assert done.returncode != 0 and time.monotonic() - started < 20  # the fetch itself is tried for a minute
    assert "has no boto3, by which the payload is fetched: No module named boto3" in done.stderr
    assert "this node stays as it is: the failure could not be reported" in done.stderr


@pytest.fixture
def metadata() -> Iterator[dict[str, str]]:
    """The environment of a node with a metadata service, which answers with an instance id and wants a token."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, text: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_PUT(self) -> None:
            self.answer(200 if self.headers.get("X-aws-ec2-metadata-token-ttl-seconds") else 400, "token")

        def do_GET(self) -> None:
            items = {"/latest/meta-data/instance-id": "i-0123", "/latest/meta-data/local-ipv4": "10.0.0.7"}
            self.answer(200 if self.headers.get("X-aws-ec2-metadata-token") == "token" else 401, items[self.path])

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    yield {"AWS_EC2_METADATA_DISABLED": "false", "AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint}
    server.shutdown()
    server.server_close()


def test_a_bootstrap_that_fails_is_reported_and_the_node_replaced(machine, payload, fake_s3, metadata):
    """Its causes are no secret of one node's log (pcluster 3604, ADT 189: a bootstrap failure is opaque)."""
    document = render(spec_for(payload), payload, bucket="assets", key="payload.xz").replace(payload.sha256, "0" * 64)
    done = machine.boot(document, **fake_s3, **metadata)
    assert done.returncode != 0
    assert "traincluster: i-0123 is being replaced." in done.stdout, done.stderr
    bucket = Path(fake_s3["FAKE_S3"], "bucket/run")
    event = json.loads((bucket / "nodes/i-0123.jsonl").read_text())
    assert (event["node"], event["address"], event["step"], event["state"]) == ("i-0123", "10.0.0.7", "bootstrap", "failed")
    assert event["detail"].startswith("the bootstrap failed in step 'check and unpack the payload': ")
    assert f"the payload has sha256 {payload.sha256}, not {'0' * 64}" in event["detail"]
    assert json.loads((bucket / "replacements/i-0123.json").read_text())["reason"] == event["detail"]
    assert Path(fake_s3["FAKE_S3"], "health").read_text() == "i-0123 Unhealthy False\n"


def test_a_bootstrap_that_fails_again_and_again_is_not_replaced_without_end(machine, payload, fake_s3, metadata):
    records = Path(fake_s3["FAKE_S3"], "bucket/run/replacements")
    records.mkdir(parents=True)
    for number in range(5):
        (records / f"i-{number}.json").write_text("{}")
    document = render(spec_for(payload), payload, bucket="assets", key="payload.xz")
    done = machine.boot(document, AGENT_STATUS="3", **fake_s3, **metadata)
    assert done.returncode == 3
    assert "6 nodes in 24 hours were not fit, 5 may be replaced. This node stays as it is." in done.stderr
    assert "step 'start the node agent'" in json.loads((records / "i-0123.json").read_text())["reason"]
    assert not Path(fake_s3["FAKE_S3"], "health").exists()


def test_what_the_bootstrap_records_is_counted_by_the_agents(machine, payload, fake_s3, metadata):
    machine.boot(render(spec_for(payload), payload, bucket="assets", key="payload.xz"), AGENT_STATUS="3", **fake_s3, **metadata)
    budget = Replacements(store=DirectoryStore(Path(fake_s3["FAKE_S3"], "bucket/run")), allowed=1)
    assert "2 nodes in 24 hours" in budget.spent(node="i-4567", reason="no GPUs")


def test_an_agent_that_does_not_start_is_told(machine, payload):
    done = machine.boot(render(spec_for(payload), payload), AGENT_STATUS="3")
    assert done.returncode == 3
    assert "failed in step 'start the node agent' (exit status 3)" in done.stderr


def test_an_image_without_the_python_is_told(machine, payload):
    done = machine.boot(render(spec_for(payload), payload), TRAINCLUSTER_PYTHON="/opt/nothing/bin/python")
    assert done.returncode != 0
    assert "/opt/nothing/bin/python is not an executable" in done.stderr
    assert "failed in step 'find the image's Python'" in done.stderr
    assert not (machine.root / "etc").exists()
