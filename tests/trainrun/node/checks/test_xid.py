"""Which messages of NVIDIA's driver make a node unfit (ADT pull request 1190: Xid 64; containers-roadmap 2432)."""

from __future__ import annotations

import re

import pytest

from tests.trainrun.node.checks.conftest import cluster_of, said
from trainrun.node.checks.xid import REBOOT, REPLACE, WATCH, check_xids, classify
from trainrun.node.outcome import StepFailed

GPUS = cluster_of(accelerator="nvidia", accelerators_per_node=8)


def xid(code, text="pid=1896, name=python, something"):
    return f"[ 1234.567890] NVRM: Xid (PCI:0000:53:00): {code}, {text}"


@pytest.fixture
def kernel_says(program):
    def say(*lines):
        program("journalctl", "#!/bin/sh\nexit 1")
        program("dmesg", said("kernel.txt") + "\n".join(lines))

    return say


def test_a_quiet_kernel(kernel_says):
    kernel_says()
    assert check_xids(GPUS) == "no Xid messages"


@pytest.mark.parametrize("code", [64, 79, 48, 95, 119, 143])
def test_what_makes_a_gpu_useless_fails_with_the_line_and_what_to_do(code, kernel_says):
    kernel_says(xid(code))
    wanted = "replace the instance" if code in REPLACE else "a reboot clears it"
    with pytest.raises(StepFailed, match=rf"NVRM: Xid \(PCI:0000:53:00\): {code}, .*{wanted}"):
        check_xids(GPUS)


@pytest.mark.parametrize("code", [13, 31, 43, 45, 63, 94])
def test_an_applications_faults_are_told_and_not_held_against_the_node(code, kernel_says):
    kernel_says(xid(code))
    assert re.search(rf"1 Xid message, none of them against the node: .*: {code}, .*to be watched", check_xids(GPUS))


def test_one_that_nobody_knows_is_told_and_not_fatal(kernel_says):
    kernel_says(xid(999))
    assert "see NVIDIA's catalogue" in check_xids(GPUS)


def test_after_other_xids_the_driver_says_itself_what_is_needed():
    asked = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    cleared = "GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)"
    assert [action for action, _, _ in classify("\n".join([xid(154, asked), xid(154, cleared)]))] == ["reboot", "watch"]


def test_errors_of_nvswitches_count_when_they_are_fatal():
    log = """nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore MCTO
nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"""
    assert [action for action, _, _ in classify(log)] == ["watch", "reboot"]


def test_a_code_is_of_one_kind():
    assert not REPLACE.keys() & REBOOT.keys()
    assert not WATCH & (REPLACE.keys() | REBOOT.keys())


def test_a_log_that_cannot_be_read_is_told(no_programs):
    assert "cannot be read" in check_xids(GPUS)
