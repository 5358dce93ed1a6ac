"""All checks of a node together."""

from __future__ import annotations

import sys

import pytest

from trainrun.directory import DirectoryStore
from trainrun.node.check import check, told
from trainrun.node.checks.runner import ChecksFailed
from trainrun.node.checks.store import check_store
from trainrun.node.events import Events
from trainrun.node.metadata import Identity
from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.node.software import Software
from trainrun.spec import ClusterSpec, JobSpec, MountSpec, RunSpec, StorageSpec
from trainrun.store import StoreError, open_store


def spec_of(tmp_path, *, mounts=(), **cluster):
    return RunSpec(
        run="r",
        region="us-east-1",
        cluster=ClusterSpec(name="c", nodes_min=1, nodes_desired=1, nodes_max=1, **{"instance_type": "p5.48xlarge", **cluster}),
        job=JobSpec(entry_point="train.py"),
        storage=StorageSpec(location=str(tmp_path), mounts=mounts),
    )


@pytest.fixture
def events(tmp_path):
    events = Events(
        identity=Identity(node="i-0123", address="10.0.0.7"), path=tmp_path / "events", store=DirectoryStore(tmp_path / "run")
    )
    events.report("check", "started")
    return events


@pytest.fixture
def places(tmp_path):
    places = Places(root=tmp_path / "root")
    places.state.mkdir(parents=True)
    return places


@pytest.fixture
def look(events, places, tmp_path):
    """look(spec, python): the checks of a node."""

    def run(spec, python=sys.executable):
        store = DirectoryStore(tmp_path / "run")
        return check(
            spec=spec, software=Software(python), places=places, node="i-0123", store=store, key=events.key, send=events.send
        )

    return run


def test_a_sound_cpu_node_says_what_was_found_and_how_long_it_took(look, tmp_path):
    text = told(look(spec_of(tmp_path, instance_type="c7i.large")))
    names = [one.split()[0] for one in text.split("; ")]
    assert names == ["fabric", "accelerators", "torch", "launcher", "state", "clock", "store"]
    assert "torch 2." in text and "can be written" in text


def test_all_faults_are_reported_together(look, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nonexistent")
    mounts = (MountSpec(type="lustre", source="fs@tcp:/x", path="/fsx"),)
    spec = spec_of(tmp_path, mounts=mounts, accelerator="nvidia", accelerators_per_node=8, instance_type="g5.48xlarge")
    with pytest.raises(ChecksFailed) as failure:
        look(spec, "/nonexistent/python")
    faults = {one.name: one.fault for one in failure.value.results if one.fault}
    assert list(faults) == ["driver", "accelerators", "torch", f"disk {tmp_path}/root/fsx"]
    assert "0 accelerators" in str(failure.value)
    assert "/nonexistent/python cannot be run" in str(failure.value)


def test_bandwidth_is_measured_when_it_is_asked_for_and_all_else_is_well(look, monkeypatch, tmp_path):
    monkeypatch.setattr("trainrun.node.check.machine_checks", lambda _: [])
    monkeypatch.setattr("trainrun.node.check.check_bandwidth", lambda *_: "fast")
    monkeypatch.setattr("trainrun.node.check.check_python", lambda *_: "well")
    gpus = {"instance_type": "g5.48xlarge", "accelerator": "nvidia", "accelerators_per_node": 8}
    assert "bandwidth 0" not in told(look(spec_of(tmp_path, **gpus)))
    assert told(look(spec_of(tmp_path, **gpus, bandwidth_check=True))).endswith("s: fast")


def test_a_bucket_that_is_not_there_is_named(events, aws, tmp_path):
    store = open_store("s3://no-such-bucket/run")
    lost = Events(identity=Identity(node="i-0123", address="10.0.0.7"), path=tmp_path / "events", store=store)
    with pytest.raises(StepFailed, match=r"s3://no-such-bucket/run cannot be written and read: .*NoSuchBucket.*role allow it"):
        check_store(store, key=lost.key, send=lost.send, timeout=0)


def test_a_store_that_takes_a_moment_is_waited_for(events, monkeypatch, tmp_path):
    monkeypatch.setattr("trainrun.node.checks.store.time.sleep", lambda _: None)
    failures = [StoreError("not yet"), StoreError("not yet")]

    def send_later():
        if failures:
            raise failures.pop()
        events.send()

    assert check_store(DirectoryStore(tmp_path / "run"), key=events.key, send=send_later).endswith("can be written")
