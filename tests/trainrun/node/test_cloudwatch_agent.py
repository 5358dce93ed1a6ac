"""The CloudWatch agent: its configuration by the rules of its schema, and how it is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from trainrun.config import ConfigError
from trainrun.node.cloudwatch_agent import FOLDER, configuration, configure
from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.spec import ClusterSpec, JobSpec, MonitoringSpec, RunSpec, StorageSpec, machine_metrics

CPU = ClusterSpec(name="c", instance_type="c7i.large", nodes_min=1, nodes_desired=1, nodes_max=1)
P5 = replace(CPU, instance_type="p5.48xlarge", accelerator="nvidia", accelerators_per_node=8, efa_interfaces=32)
NEW, OLD = (1, 300071, 0), (1, 300049, 1)

# What the agent's schema asks of the parts that are used here (amazon-cloudwatch-agent: translator/config/schema.json).
TEXTS = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "uniqueItems": True}
BASIC = {
    "type": "object",
    "required": ["measurement"],
    "properties": {"measurement": TEXTS, "drop_original_metrics": TEXTS, "resources": {"type": "array", "maxItems": 256}},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "agent": {
            "type": "object",
            "properties": {"metrics_collection_interval": {"type": "integer", "minimum": 1}, "region": {"type": "string"}},
        },
        "metrics": {
            "type": "object",
            "required": ["metrics_collected"],
            "additionalProperties": False,
            "properties": {
                "namespace": {"type": "string", "minLength": 1, "maxLength": 255},
                "append_dimensions": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        name: {"const": f"${{aws:{name}}}"}
                        for name in ("ImageId", "InstanceId", "InstanceType", "AutoScalingGroupName")
                    },
                },
                "aggregation_dimensions": {"type": "array", "items": TEXTS, "minItems": 1, "uniqueItems": True},
                "metrics_collected": {"type": "object", "minProperties": 1, "additionalProperties": BASIC},
            },
        },
        "logs": {
            "type": "object",
            "required": ["logs_collected"],
            "properties": {
                "logs_collected": {
                    "type": "object",
                    "properties": {
                        "files": {
                            "type": "object",
                            "required": ["collect_list"],
                            "properties": {
                                "collect_list": {
                                    "type": "array",
                                    "minItems": 1,
                                    "uniqueItems": True,
                                    "items": {
                                        "type": "object",
                                        "required": ["file_path"],
                                        "additionalProperties": False,
                                        "properties": {
                                            "file_path": {"type": "string"},
                                            "log_group_name": {"type": "string", "pattern": r"^[\w.\-/#]+$", "maxLength": 512},
                                            "log_stream_name": {"type": "string", "pattern": "^[^:*]+$", "maxLength": 512},
                                            "timezone": {"enum": ["UTC", "Local", "LOCAL"]},
                                        },
                                    },
                                }
                            },
                        }
                    },
                }
            },
        },
    },
}


def spec_of(cluster: ClusterSpec = CPU, *, launcher: str = "torchrun", **monitoring: Any) -> RunSpec:
    return RunSpec(
        run="r",
        region="eu-west-1",
        cluster=cluster,
        job=JobSpec(entry_point="train.py", launcher=launcher),
        storage=StorageSpec(location="s3://b"),
        monitoring=MonitoringSpec(**{"log_group": "Stack-Logs1234", **monitoring}),
    )


def configuration_of(spec: RunSpec, version: tuple[int, ...] = NEW) -> dict[str, Any]:
    found = configuration(spec, node="i-0abc", places=Places(root=Path("/")), version=version)
    jsonschema.validate(found, SCHEMA)
    return found


@pytest.mark.parametrize("cluster", [CPU, P5, replace(CPU, accelerator="neuron", efa_interfaces=8)])
@pytest.mark.parametrize("version", [NEW, OLD, ()])
@pytest.mark.parametrize("log_group", ["", "Stack-Logs1234"])
def test_every_configuration_is_as_the_schema_says(cluster, version, log_group):
    assert ("logs" in configuration_of(spec_of(cluster, log_group=log_group), version)) == bool(log_group)


def test_metrics_are_named_by_group_and_by_instance_and_by_nothing_else():
    metrics = configuration_of(spec_of(P5, namespace="Team/Training"))["metrics"]
    assert metrics["namespace"] == "Team/Training"
    assert metrics["aggregation_dimensions"] == [["AutoScalingGroupName"], ["InstanceId"]]
    assert set(metrics["append_dimensions"]) == {"AutoScalingGroupName", "InstanceId"}
    for section in metrics["metrics_collected"].values():
        assert section["drop_original_metrics"] == section["measurement"]


def test_what_is_measured_goes_by_what_the_node_has():
    machine = {"cpu", "mem", "disk", "diskio", "net"}
    assert set(configuration_of(spec_of())["metrics"]["metrics_collected"]) == machine
    assert set(configuration_of(spec_of(P5))["metrics"]["metrics_collected"]) == machine | {"nvidia_gpu", "efa"}
    assert set(configuration_of(spec_of(P5), OLD)["metrics"]["metrics_collected"]) == machine | {"nvidia_gpu"}
    gpus = configuration_of(spec_of(P5))["metrics"]["metrics_collected"]["nvidia_gpu"]
    assert {"utilization_gpu", "memory_used", "power_draw", "temperature_gpu"} <= set(gpus["measurement"])


def test_the_names_for_alarms_are_those_that_are_sent():
    sent = {name for section in (*machine_metrics.MACHINE, machine_metrics.GPU) for name in section.metrics}
    for name in (machine_metrics.GPU_UTILIZATION, machine_metrics.CPU_UTILIZATION, machine_metrics.DISK_USED):
        assert name in sent
    assert all(name.startswith("efa_") for name in machine_metrics.EFA.metrics)


def test_each_log_has_a_stream_of_its_own_beside_the_events():
    files = configuration_of(spec_of())["logs"]["logs_collected"]["files"]["collect_list"]
    assert {one["log_stream_name"]: one["file_path"] for one in files} == {
        "i-0abc/cloud-init-output": "/var/log/cloud-init-output.log",
        "i-0abc/agent": "/var/log/traincluster/agent.log",
        "i-0abc/torchrun": "/var/log/traincluster/torchrun.log",
    }
    assert {one["log_group_name"] for one in files} == {"Stack-Logs1234"}
    files = configuration_of(spec_of(launcher="mpirun"))["logs"]["logs_collected"]["files"]["collect_list"]
    assert files[-1]["file_path"] == "/var/log/traincluster/mpirun.log"


class Control:
    """Stands for systemctl and the agent's own program."""

    def __init__(self, *, fails: bool = False) -> None:
        self.active, self.fails = False, fails
        self.ran: list[tuple[str, ...]] = []

    def __call__(self, *command: str, **_: Any) -> str:
        self.ran.append(command)
        if command[0] == "systemctl":
            return "active\n" if self.active else "inactive\n"
        if self.fails:
            raise StepFailed("amazon-cloudwatch-agent-ctl failed with status 1: invalid json")
        self.active = True
        return ""


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A node whose image has the agent."""
    found = Places(root=tmp_path)
    found.spec.parent.mkdir(parents=True)
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / "amazon-cloudwatch-agent-ctl").touch()
    (tmp_path / FOLDER / "CWAGENT_VERSION").write_text("1.300071.0b1100\n")
    return found


def test_it_is_started_once_and_again_when_it_is_to_do_something_else(places):
    control = Control()
    first = configure(spec_of(P5), node="i-1", places=places, run=control)
    file = places.spec.with_name("cloudwatch-agent.json")
    program = str(places.root / FOLDER / "amazon-cloudwatch-agent-ctl")
    assert control.ran == [(program, "-a", "fetch-config", "-m", "ec2", "-s", "-c", f"file:{file}")]
    assert first.changed and "efa" in json.loads(file.read_text())["metrics"]["metrics_collected"]
    again = configure(spec_of(P5), node="i-1", places=places, run=control)
    assert not again.changed and again.detail == "runs, namespace Traincluster"
    assert configure(spec_of(P5, namespace="Other"), node="i-1", places=places, run=control).changed
    control.active = False
    assert configure(spec_of(P5, namespace="Other"), node="i-1", places=places, run=control).changed


def test_an_image_without_it_says_so_and_trains(tmp_path):
    control = Control()
    done = configure(spec_of(), node="i-1", places=Places(root=tmp_path), run=control)
    assert done.detail.startswith("the image has none: no metrics of the machine") and not control.ran


def test_an_agent_that_does_not_start_stops_nobody_and_is_tried_again(places):
    control = Control(fails=True)
    assert configure(spec_of(), node="i-1", places=places, run=control).detail.startswith("not started: amazon-cloudwatch-agent")
    control.fails = False
    assert configure(spec_of(), node="i-1", places=places, run=control).changed


def test_who_wants_none_gets_none(places):
    control = Control()
    assert configure(spec_of(namespace=""), node="i-1", places=places, run=control).detail == "not wanted"
    assert not control.ran


@pytest.mark.parametrize("namespace", ["AWS/EC2", "a b", "x" * 256])
def test_a_namespace_that_cloudwatch_refuses_is_refused_here(namespace):
    with pytest.raises(ConfigError, match=r"namespace is .*Allowed: letters, digits"):
        MonitoringSpec(namespace=namespace)
