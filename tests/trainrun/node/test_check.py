"""What a node must have before its peers wait for it."""

from __future__ import annotations

import resource
import sys

import pytest

from trainrun.directory import DirectoryStore
from trainrun.node.check import check, check_accelerators, check_efa, check_python, check_store
from trainrun.node.events import Events
from trainrun.node.metadata import Identity
from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.node.prepare import prepare
from trainrun.spec import ClusterSpec, JobSpec, RunSpec, StorageSpec
from trainrun.store import StoreError, open_store


def cluster_of(**fields):
    return ClusterSpec(name="c", nodes_min=1, nodes_desired=1, nodes_max=1, **{"instance_type": "p5.48xlarge", **fields})


def spec_of(tmp_path, **cluster):
    return RunSpec(
        run="r",
        region="us-east-1",
        cluster=cluster_of(**cluster),
        job=JobSpec(entry_point="train.py"),
        storage=StorageSpec(location=str(tmp_path)),
    )


def command_that_prints(tmp_path, monkeypatch, name, text):
    """Put a command of that name first on PATH."""
    script = tmp_path / "bin" / name
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"#!/bin/sh\ncat <<'EOF'\n{text}\nEOF\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")


def gpus(count):
    return "\n".join(f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-{i}{i}{i})" for i in range(count))


def test_on_a_cpu_node_nothing_is_looked_for(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert check_accelerators(cluster_of(instance_type="c7i.large")) == "no accelerators expected"


def test_all_gpus_are_there(tmp_path, monkeypatch):
    command_that_prints(tmp_path, monkeypatch, "nvidia-smi", gpus(8))
    assert check_accelerators(cluster_of(accelerator="nvidia", accelerators_per_node=8)) == "8 accelerators"


def test_a_missing_gpu_is_named_with_what_was_expected(tmp_path, monkeypatch):
    command_that_prints(tmp_path, monkeypatch, "nvidia-smi", gpus(7))
    with pytest.raises(StepFailed, match=r"(?s)7 accelerators, p5.48xlarge has 8\..*Xid.*replace the instance"):
        check_accelerators(cluster_of(accelerator="nvidia", accelerators_per_node=8))


def test_no_driver_is_no_accelerator(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(StepFailed, match=r"shows .nothing. 0 accelerators"):
        check_accelerators(cluster_of(accelerator="nvidia", accelerators_per_node=8))


def test_neuron_devices_are_counted(tmp_path):
    for name in ("neuron0", "neuron1", "neuron_core0"):
        (tmp_path / name).touch()
    cluster = cluster_of(instance_type="trn1.32xlarge", accelerator="neuron", accelerators_per_node=2)
    assert check_accelerators(cluster, devices=tmp_path) == "2 accelerators"


def test_efa_interfaces_are_counted(tmp_path):
    for name in ("rdmap79s0", "rdmap80s0"):
        (tmp_path / name).mkdir()
    assert check_efa(cluster_of(efa_interfaces=2), infiniband=tmp_path) == "2 EFA interfaces"
    with pytest.raises(StepFailed, match="show 2 EFA interfaces, the launch template asks for 32"):
        check_efa(cluster_of(efa_interfaces=32), infiniband=tmp_path)
    assert check_efa(cluster_of(), infiniband=tmp_path / "none") == "no EFA expected"


def test_a_python_without_torch_is_named_with_its_error(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(StepFailed, match=r"(?s)cannot import torch:.*libcudart.so.12.*Set the job's python"):
        check_python(str(python))


@pytest.fixture
def events(tmp_path):
    events = Events(
        identity=Identity(node="i-0123", address="10.0.0.7"), path=tmp_path / "events", store=DirectoryStore(tmp_path / "run")
    )
    events.report("check", "started")
    return events


def test_a_bucket_that_is_not_there_is_named(events, aws, tmp_path):
    store = open_store("s3://no-such-bucket/run")
    lost = Events(identity=Identity(node="i-0123", address="10.0.0.7"), path=tmp_path / "events", store=store)
    with pytest.raises(StepFailed, match=r"s3://no-such-bucket/run cannot be written and read: .*NoSuchBucket.*role allow it"):
        check_store(store, lost, timeout=0)


def test_a_store_that_takes_a_moment_is_waited_for(events, monkeypatch, tmp_path):
    monkeypatch.setattr("trainrun.node.check.time.sleep", lambda _: None)
    send, failures = events.send, [StoreError("not yet"), StoreError("not yet")]

    def send_later():
        if failures:
            raise failures.pop()
        send()

    monkeypatch.setattr(events, "send", send_later)
    assert check_store(DirectoryStore(tmp_path / "run"), events).endswith("can be written")


def test_all_faults_are_reported_together(events, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nonexistent")
    spec = spec_of(tmp_path, accelerator="nvidia", accelerators_per_node=8, instance_type="g5.48xlarge")
    with pytest.raises(StepFailed) as failure:
        check(spec=spec, python="/nonexistent/python", store=DirectoryStore(tmp_path / "run"), events=events)
    assert "0 accelerators" in str(failure.value)
    assert "/nonexistent/python cannot be run" in str(failure.value)


def test_prepare_makes_folders_and_may_run_again(tmp_path):
    spec = spec_of(tmp_path)
    places = Places(root=tmp_path)
    first, again = (prepare(spec=spec, places=places, address="127.0.0.1", attached=dict) for _ in range(2))
    assert first == again
    assert places.metrics.is_dir() and places.rank_logs.is_dir()


def test_prepare_refuses_efa_without_locked_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)  # a limit that cannot be raised
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    spec = spec_of(tmp_path, efa_interfaces=32)
    with pytest.raises(StepFailed, match="At most 65536 bytes of memory can be locked; EFA needs no limit"):
        prepare(spec=spec, places=Places(root=tmp_path), address="127.0.0.1", attached=dict)
