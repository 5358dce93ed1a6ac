"""Helpers of the node agent's tests: a metadata service of our own, an Auto Scaling group in moto, nodes as processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from trainrun.node.processes import descendants
from trainrun.spec import ClusterSpec, JobSpec, MonitoringSpec, RunSpec, ShutdownSpec, StorageSpec, TimeoutSpec

TRAINRUN = Path(__file__).resolve().parents[3] / "training" / "trainrun"


class FakeMetadata:
    """An IMDSv2 on 127.0.0.1 for one node. ``faults`` are served first: a status, "silence", or a harmed answer."""

    def __init__(self, items: dict[str, str]) -> None:
        self.items = items
        self.faults: list[int | str] = []
        self.tokens: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                fake.requests.append(("PUT", self.path))
                if self.path != "/latest/api/token" or not self.headers.get("X-aws-ec2-metadata-token-ttl-seconds"):
                    self.answer(400)
                    return
                token = f"token-{len(fake.requests)}"
                fake.tokens.add(token)
                self.answer(200, token)

            def do_GET(self) -> None:
                fake.requests.append(("GET", self.path))
                fault = fake.faults.pop(0) if fake.faults else None
                if fault == "silence":
                    time.sleep(0.6)
                    self.close_connection = True
                elif fault in ("torn", "dribble", "garbage"):
                    self.harm(fault)
                elif isinstance(fault, int):
                    self.answer(fault)
                elif self.headers.get("X-aws-ec2-metadata-token") not in fake.tokens:
                    self.answer(401)
                else:
                    item = fake.items.get(self.path.removeprefix("/latest/meta-data/"))
                    self.answer(404) if item is None else self.answer(200, item)

            def harm(self, fault: str) -> None:
                """An answer that breaks off, one that comes a byte at a time, one that is no HTTP."""
                if fault == "garbage":
                    self.wfile.write(b"\0\xff not HTTP\r\n\r\n")
                else:
                    self.send_response(200)
                    self.send_header("Content-Length", "20")
                    self.end_headers()
                    for _ in range(8 if fault == "dribble" else 1):
                        with suppress(OSError):  # who asked has given up
                            self.wfile.write(b"x")
                            self.wfile.flush()
                        time.sleep(0.1 if fault == "dribble" else 0.0)
                self.close_connection = True

            def answer(self, status: int, text: str = "") -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def fake_metadata() -> Iterator[Callable[..., FakeMetadata]]:
    """Makes metadata services, which end with the test."""
    made: list[FakeMetadata] = []

    def make(**items: str) -> FakeMetadata:
        made.append(FakeMetadata({name.replace("__", "/").replace("_", "-"): text for name, text in items.items()}))
        return made[-1]

    yield make
    for fake in made:
        fake.close()


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """An emulated AWS on a free port."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@dataclass
class Account:
    """The emulated account, with a bucket of the test's own. (All moto servers of a process share one account.)"""

    endpoint: str
    bucket: str

    def client(self, service: str) -> Any:
        return boto3.session.Session().client(service, endpoint_url=self.endpoint, region_name="us-east-1")


@pytest.fixture
def aws(moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Account:
    """The emulated account; the environment leads to it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_endpoint)
    account = Account(moto_endpoint, f"runs-{uuid.uuid4().hex[:12]}")
    account.client("s3").create_bucket(Bucket=account.bucket)
    return account


@dataclass
class EmulatedGroup:
    """A real Auto Scaling group in moto."""

    aws: Account
    name: str

    def create(self, *, desired: int, largest: int = 4) -> None:
        template = {"ImageId": "ami-12c6146b", "InstanceType": "c7i.large"}
        self.aws.client("ec2").create_launch_template(LaunchTemplateName=self.name, LaunchTemplateData=template)
        self.aws.client("autoscaling").create_auto_scaling_group(
            AutoScalingGroupName=self.name,
            LaunchTemplate={"LaunchTemplateName": self.name, "Version": "$Latest"},
            AvailabilityZones=["us-east-1a"],
            MinSize=1,
            MaxSize=largest,
            DesiredCapacity=desired,
        )

    def describe(self) -> dict[str, Any]:
        answer = self.aws.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[self.name])
        return answer["AutoScalingGroups"][0]

    def instances(self) -> list[str]:
        return [i["InstanceId"] for i in self.describe()["Instances"]]

    def lose(self, instance: str) -> str:
        """End an instance as the fleet does for a dead node; the group replaces it. Returns the replacement's id."""
        before = set(self.instances())
        self.aws.client("ec2").terminate_instances(InstanceIds=[instance])
        (replacement,) = set(self.instances()) - before
        return replacement


@pytest.fixture
def group(aws: Account) -> EmulatedGroup:
    return EmulatedGroup(aws, f"nodes-{uuid.uuid4().hex[:12]}")


JOB = '''
"""Count steps together until there is a file named enough; stop, saved, when any rank is asked to."""
import json, os, pathlib, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

shared = pathlib.Path(sys.argv[1])
state = pathlib.Path(os.environ["TRAINRUN_STATE"])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, world = dist.get_rank(), dist.get_world_size()
saved = shared / "saved"
step = int(saved.read_text()) if saved.exists() else 0
metrics = state / "metrics" / f"{int(time.time() * 1000)}-00001.jsonl"
done = False
while not done:
    flags = torch.tensor([float(bool(asked) or (state / "stop").exists()), float((shared / "enough").exists())])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    stop, done = map(bool, flags.tolist())
    step += 1
    if rank == 0:
        (shared / "saved.new").write_text(str(step))
        (shared / "saved.new").rename(saved)
        with metrics.open("a") as file:
            print(json.dumps({"step": step, "steps": 1000, "world": world, "time": time.time()}), file=file)
    with (shared / f"trace-{os.getpid()}").open("a") as file:
        print(json.dumps({"step": step, "world": world, "time": time.time()}), file=file)
    if stop and not done:
        sys.exit(75)
    time.sleep(0.05)
dist.destroy_process_group()
'''


@dataclass
class LocalNode:
    """A node as a plain process tree: the agent under our supervisor, with its own root and metadata service."""

    instance: str
    root: Path
    metadata: FakeMetadata
    process: subprocess.Popen[bytes]

    def events(self) -> list[dict[str, Any]]:
        path = self.root / "var/lib/traincluster/events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def kill(self) -> None:
        """SIGKILL of the whole tree at once, as when an instance is lost."""
        tree = [self.process.pid, *descendants(self.process.pid)]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none sees another die
            for pid in tree:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        self.process.wait(timeout=10)

    def log(self) -> str:
        logs = self.root / "var/log/traincluster"
        return "\n".join(f"== {p}\n{p.read_text(errors='replace')[-6000:]}" for p in sorted(logs.glob("*.log")))


@dataclass
class LocalCluster:
    """Nodes on loopback addresses, one per instance of the emulated group."""

    directory: Path
    aws: Account
    port: int
    make_metadata: Callable[..., FakeMetadata]
    script: str = JOB
    """The job's train.py."""
    job: dict[str, Any] = field(default_factory=dict)
    """Fields of its JobSpec that are not as usual."""
    cluster: dict[str, Any] = field(default_factory=dict)
    """Fields of its ClusterSpec that are not as usual."""
    shutdown: dict[str, Any] = field(default_factory=dict)
    """Fields of its ShutdownSpec that are not as usual."""
    stop_grace: int = 15
    nodes: dict[str, LocalNode] = field(default_factory=dict)
    addresses: Iterator[str] = field(default_factory=lambda: (f"127.0.0.{n}" for n in range(2, 255)))

    @property
    def shared(self) -> Path:
        return self.directory / "shared"

    def spec(self) -> RunSpec:
        return RunSpec(
            run="demo",
            region="us-east-1",
            cluster=ClusterSpec(
                name="test", instance_type="c7i.large", **{"nodes_min": 1, "nodes_desired": 2, "nodes_max": 2, **self.cluster}
            ),
            job=JobSpec(
                **{
                    "entry_point": "train.py",
                    "arguments": (str(self.shared),),
                    "python": sys.executable,
                    "environment": {"OMP_NUM_THREADS": "1"},
                    **self.job,
                }
            ),
            storage=StorageSpec(location=f"s3://{self.aws.bucket}/prefix"),
            timeouts=TimeoutSpec(meet=60, rendezvous=60, peer_lost=5, stop_grace=self.stop_grace),
            monitoring=MonitoringSpec(publish_seconds=1.0),
            shutdown=ShutdownSpec(**self.shutdown),
        )

    def boot(self, instance: str) -> LocalNode:
        """Do what cloud-init and the bootstrap do, then start the agent."""
        root = self.directory / instance
        for folder in ("etc/traincluster", "var/lib/traincluster", "opt/traincluster/payload/project"):
            (root / folder).mkdir(parents=True)
        (root / "etc/traincluster/run.json").write_text(self.spec().to_json())
        (root / "opt/traincluster/payload/trainrun").symlink_to(TRAINRUN)
        (root / "opt/traincluster/payload/project/train.py").write_text(self.script)
        metadata = self.make_metadata(instance_id=instance, local_ipv4=next(self.addresses))
        environment = {
            **os.environ,
            "AWS_ENDPOINT_URL": self.aws.endpoint,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.endpoint,
            "TRAINCLUSTER_ROOT": str(root),
            "TRAINRUN_RENDEZVOUS_PORT": str(self.port),
            "PYTHONPATH": str(root / "opt/traincluster/payload"),
        }
        del environment["AWS_EC2_METADATA_DISABLED"]  # on a node the service is there: its own, on 127.0.0.1
        process = subprocess.Popen(
            [sys.executable, "-m", "trainrun.node", "supervise"], env=environment, stderr=subprocess.DEVNULL
        )
        self.nodes[instance] = LocalNode(instance, root, metadata, process)
        return self.nodes[instance]

    def trace(self) -> list[dict[str, Any]]:
        """What all ranks did, in order of time."""
        lines = [line for path in self.shared.glob("trace-*") for line in path.read_text().splitlines(keepends=True)]
        return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda entry: entry["time"])

    def wait(self, what: str, condition: Callable[[], bool], *, seconds: float) -> None:
        """Wait for a condition.

        Raises:
            AssertionError: not met in time; with the nodes' logs.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(node.log() for node in self.nodes.values())
                raise AssertionError(f"{what}: not within {seconds:g} s.\n{logs}")
            time.sleep(0.1)

    def wait_for_world(self, world: int, *, since: float = 0.0, seconds: float = 90.0) -> float:
        """Wait until that many ranks train together; the time of their first step since."""

        def first() -> float | None:
            return next((e["time"] for e in self.trace() if e["world"] == world and e["time"] > since), None)

        self.wait(f"{world} ranks train together", lambda: first() is not None, seconds=seconds)
        found = first()
        assert found is not None
        return found

    def objects(self, prefix: str) -> dict[str, bytes]:
        """The run's objects under a prefix."""
        client, bucket = self.aws.client("s3"), self.aws.bucket
        top = "prefix/demo/"
        listed = client.list_objects_v2(Bucket=bucket, Prefix=top + prefix).get("Contents", [])
        keys = [entry["Key"] for entry in listed]
        return {key.removeprefix(top): client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys}

    def host(self) -> str:
        """The instance that hosts the rendezvous."""
        claims = self.objects("rendezvous/")
        found: str = json.loads(claims[max(claims)])["node"]
        return found

    def end(self) -> None:
        for node in self.nodes.values():
            if node.process.poll() is None:
                node.kill()


@pytest.fixture
def start_cluster(
    tmp_path: Path,
    group: EmulatedGroup,
    aws: Account,
    fake_metadata: Callable[..., FakeMetadata],
    free_port: int,
) -> Iterator[Callable[..., LocalCluster]]:
    """Makes a group of two nodes, or of so many, and boots them; takes the fields of `LocalCluster`."""
    clusters = []

    def start(nodes: int = 2, **fields: Any) -> LocalCluster:
        group.create(desired=nodes)
        cluster = LocalCluster(tmp_path, aws, free_port, fake_metadata, **fields)
        clusters.append(cluster)
        cluster.shared.mkdir()
        for instance in group.instances():
            cluster.boot(instance)
        return cluster

    yield start
    for cluster in clusters:
        cluster.end()


@pytest.fixture
def cluster(start_cluster: Callable[..., LocalCluster]) -> LocalCluster:
    """A group of two with both nodes booted; they train until there is a file named enough."""
    return start_cluster()


@pytest.fixture
def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
