"""The systemd unit and the supervisor."""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from trainrun.node.places import Places
from trainrun.node.service import passed_on, unit_text
from trainrun.spec import ClusterSpec, JobSpec, RunSpec, StorageSpec


def test_the_unit():
    text = unit_text(
        python="/opt/pytorch/bin/python",
        environment={"PYTHONPATH": "/opt/traincluster/payload", "AWS_ENDPOINT_URL": 'http://h/%41"\\'},
        stop_grace=90,
    )
    assert 'Environment="AWS_ENDPOINT_URL=http://h/%%41\\"\\\\"\nEnvironment="PYTHONPATH=/opt/traincluster/payload"\n' in text
    unit = configparser.RawConfigParser(strict=False)
    unit.read_string(text)
    service = unit["Service"]
    assert service["ExecStart"] == "/opt/pytorch/bin/python -m trainrun.node run"
    assert service["LimitMEMLOCK"] == "infinity"  # PAM's limits do not reach units; EFA needs it
    assert service["KillMode"] == "mixed"  # SIGTERM to the agent alone, which has the ranks save; then SIGKILL to all
    assert int(service["TimeoutStopSec"]) > 90
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "78")
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    assert unit["Unit"]["After"].split() == ["network-online.target", "dlami-nvme.service"]  # disks that it mounts stay its own
    assert unit["Install"]["WantedBy"] == "multi-user.target"


def test_what_the_bootstrap_was_told_is_passed_on():
    environment = {"AWS_ENDPOINT_URL": "a", "TRAINCLUSTER_PYTHON": "b", "HOME": "/root", "TRAINRUN_RENDEZVOUS_PORT": "1"}
    assert passed_on(environment, places=Places(root=Path("/"))) == {
        "AWS_ENDPOINT_URL": "a",
        "TRAINCLUSTER_PYTHON": "b",
        "TRAINRUN_RENDEZVOUS_PORT": "1",
        "PYTHONPATH": "/opt/traincluster/payload",
    }


def make_node(root, *, python):
    spec = RunSpec(
        run="demo",
        region="us-east-1",
        cluster=ClusterSpec(name="c", instance_type="c7i.large", nodes_min=1, nodes_desired=1, nodes_max=1),
        job=JobSpec(entry_point="train.py", python=python),
        storage=StorageSpec(location=str(root / "store")),
    )
    (root / "etc/traincluster").mkdir(parents=True)
    (root / "etc/traincluster/run.json").write_text(spec.to_json())
    (root / "opt/traincluster/payload").mkdir(parents=True)
    package = Path(sys.modules["trainrun.node.service"].__file__).parents[1]
    (root / "opt/traincluster/payload/trainrun").symlink_to(package)


def test_start_leaves_a_supervised_agent_behind_that_does_not_repeat_a_failed_check(tmp_path, fake_metadata, aws):
    make_node(tmp_path, python="/nonexistent/python")
    metadata = fake_metadata(instance_id="i-0123", local_ipv4="127.0.0.1")
    environment = {
        **os.environ,
        "AWS_ENDPOINT_URL": aws.endpoint,
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.endpoint,
        "TRAINCLUSTER_ROOT": str(tmp_path),
        "PYTHONPATH": str(tmp_path / "opt/traincluster/payload"),
    }
    del environment["AWS_EC2_METADATA_DISABLED"]
    command = [sys.executable, "-m", "trainrun.node", "start"]
    started = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
    supervisor = int(started.stdout.split("supervisor ")[1].rstrip(".\n"))

    deadline = time.monotonic() + 20
    while _lives(supervisor):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    events = [json.loads(line) for line in (tmp_path / "store/demo/nodes/i-0123.jsonl").read_text().splitlines()]
    assert [(e["step"], e["state"]) for e in events] == [
        ("prepare", "started"),
        ("prepare", "done"),
        ("software", "started"),
        ("software", "done"),
        ("check", "started"),
        ("check", "failed"),
    ]
    assert events[-1]["detail"].startswith("torch: /nonexistent/python cannot be run to import torch: ")


def _lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
