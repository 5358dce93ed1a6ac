"""Versions that go together, and are new enough."""

from __future__ import annotations

import pytest

from tests.trainrun.node.checks.conftest import SAID, cluster_of, said
from trainrun.node.checks.versions import (
    MINIMUM,
    check_driver,
    check_efa_installer,
    driver_versions,
    minimum_of,
    older,
    torch_problems,
)
from trainrun.node.outcome import StepFailed


def gpus_of(instance_type):
    return cluster_of(instance_type, accelerator="nvidia", accelerators_per_node=8, efa_interfaces=8)


@pytest.fixture
def driver_570(program):
    program("nvidia-smi", said("nvidia-smi.txt"))


def test_versions_are_read_from_the_head_of_nvidia_smis_table(driver_570):
    assert driver_versions() == ("570.133.20", "12.8")


@pytest.mark.parametrize("instance_type", ["p4d.24xlarge", "p5.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge", "g5.48xlarge"])
def test_a_driver_that_is_new_enough(instance_type, driver_570):
    assert check_driver(gpus_of(instance_type)) == "driver 570.133.20, for CUDA up to 12.8"


@pytest.mark.parametrize(
    ("instance_type", "needed"), [("p6-b300.48xlarge", "580"), ("g7e.48xlarge", "575"), ("g7.48xlarge", "595")]
)
def test_a_driver_that_is_too_old(instance_type, needed, driver_570):
    with pytest.raises(
        StepFailed, match=f"driver is 570.133.20, and {instance_type} needs {needed} or newer. Take a newer image"
    ):
        check_driver(gpus_of(instance_type))


def test_no_driver(no_programs):
    with pytest.raises(StepFailed, match="nvidia-smi shows no driver"):
        check_driver(gpus_of("p5.48xlarge"))


def test_torch_for_a_newer_cuda_than_the_drivers(driver_570):
    (problem,) = torch_problems(gpus_of("p5.48xlarge"), cuda="13.0", nccl="2.28.3")
    assert "built with CUDA 13.0, and the driver 570.133.20 of this image goes up to CUDA 12.8" in problem


def test_any_build_of_the_drivers_major_cuda_will_do(driver_570):
    assert torch_problems(gpus_of("p5.48xlarge"), cuda="12.9", nccl="2.26.2") == []


def test_torch_that_is_too_old_for_the_type(driver_570):
    problems = torch_problems(gpus_of("p6-b200.48xlarge"), cuda="12.4", nccl="2.21.5")
    assert [problem.partition(", and")[0] for problem in problems] == [
        "It was built with CUDA 12.4",
        "It was built with NCCL 2.21.5",
    ]


def test_efa_software(tmp_path):
    installed = SAID / "efa_installed_packages.txt"
    assert check_efa_installer(gpus_of("p5.48xlarge"), installed=installed) == "EFA installer 1.38.0"
    with pytest.raises(StepFailed, match=r"installer 1.38.0 .*, and p6-b200.48xlarge needs 1.41 or newer"):
        check_efa_installer(gpus_of("p6-b200.48xlarge"), installed=installed)
    assert "has left no" in check_efa_installer(gpus_of("p6-b200.48xlarge"), installed=tmp_path / "none")


@pytest.mark.parametrize(
    ("version", "than", "is_older"),
    [
        ("2.26.2", "2.26.2", False),
        ("2.9", "2.26.2", True),
        ("580", "580", False),
        ("570.9", "580", True),
        ("1.48", "1.48.0", True),
    ],
)
def test_order_of_versions(version, than, is_older):
    assert older(version, than) is is_older


def test_types_of_one_letter_more_are_others():
    assert minimum_of("p5.48xlarge") is MINIMUM["p5."]
    assert minimum_of("p5.4xlarge") is MINIMUM["p5.4xlarge"]
    assert minimum_of("p5en.48xlarge") is MINIMUM["p5en."]
    assert minimum_of("g7e.2xlarge") is MINIMUM["g7e."]
    assert minimum_of("c7i.large").driver == ""
