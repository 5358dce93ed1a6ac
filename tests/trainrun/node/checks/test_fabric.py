"""The fabric manager of types with NVSwitch."""

from __future__ import annotations

import pytest

from trainrun.node.checks.fabric import NVSWITCH_TYPES, check_fabric
from trainrun.node.outcome import StepFailed
from trainrun.spec import ClusterSpec


def cluster_of(instance_type):
    return ClusterSpec(name="c", nodes_min=1, nodes_desired=1, nodes_max=1, instance_type=instance_type, accelerator="nvidia")


@pytest.fixture
def systemctl(tmp_path, monkeypatch):
    """systemctl(script): a systemctl of the test's own, whose calls are kept in the file `calls`."""

    def make(script):
        command = tmp_path / "systemctl"
        command.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n{script}\n')
        command.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return tmp_path / "calls"

    return make


@pytest.mark.parametrize("instance_type", ["g5.48xlarge", "g6.48xlarge", "p5.4xlarge", "c7i.2xlarge", "trn1.32xlarge"])
def test_boot_03_types_without_nvswitch_need_none(systemctl, instance_type):
    calls = systemctl("exit 1")
    assert check_fabric(cluster_of(instance_type)) == "no fabric manager needed"
    assert not calls.exists()


@pytest.mark.parametrize("instance_type", NVSWITCH_TYPES)
def test_boot_03_an_active_fabric_manager_is_left_alone(systemctl, instance_type):
    calls = systemctl("echo active")
    assert check_fabric(cluster_of(instance_type)) == "fabric manager active"
    assert calls.read_text().splitlines() == ["is-active nvidia-fabricmanager"]


def test_boot_03_a_fabric_manager_that_is_not_started_is_started_and_waited_for(systemctl, tmp_path):
    started = tmp_path / "started"
    systemctl(f'case "$1" in start) touch {started};; is-active) [ -e {started} ] && echo active || echo inactive;; esac')
    assert check_fabric(cluster_of("p4d.24xlarge"), wait_seconds=5) == "fabric manager active"


def test_boot_03_a_fabric_manager_that_fails_is_a_clear_failure_within_bounds(systemctl):
    systemctl('case "$1" in is-active) echo failed;; status) echo "driver 575 and fabric manager 570 differ";; esac')
    with pytest.raises(StepFailed, match=r"(?s)is failed after 0 s, and p5.48xlarge needs it:.*575 and fabric manager 570"):
        check_fabric(cluster_of("p5.48xlarge"), wait_seconds=0.2)


def test_boot_03_a_node_without_systemd_says_that_it_is_not_there(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(StepFailed, match="is not there after"):
        check_fabric(cluster_of("p5.48xlarge"), wait_seconds=0.1)
