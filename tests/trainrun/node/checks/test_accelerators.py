"""How many accelerators there are."""

from __future__ import annotations

import pytest

from tests.trainrun.node.checks.conftest import cluster_of, gpus, said
from trainrun.node.checks.accelerators import check_accelerators
from trainrun.node.outcome import StepFailed

EIGHT_GPUS = cluster_of(accelerator="nvidia", accelerators_per_node=8)
SIXTEEN_CHIPS = cluster_of("trn1.32xlarge", accelerator="neuron", accelerators_per_node=16)


def test_on_a_cpu_node_nothing_is_looked_for(no_programs):
    assert check_accelerators(cluster_of("c7i.large")) == "no accelerators expected"


def test_all_gpus_are_there(program):
    program("nvidia-smi", gpus(8))
    assert check_accelerators(EIGHT_GPUS) == "8 accelerators"


def test_a_missing_gpu_is_named_with_what_was_expected(program):
    program("nvidia-smi", gpus(7))
    with pytest.raises(StepFailed, match=r"(?s)7 accelerators, p5.48xlarge has 8\..*Xid.*replace the instance"):
        check_accelerators(EIGHT_GPUS)


def test_no_driver_is_no_accelerator(no_programs):
    with pytest.raises(StepFailed, match=r"shows .nothing. 0 accelerators"):
        check_accelerators(EIGHT_GPUS)


@pytest.fixture
def chips(tmp_path):
    folder = tmp_path / "dev"
    folder.mkdir()
    for name in (*(f"neuron{i}" for i in range(16)), "neuron_core0"):
        (folder / name).touch()
    return folder


def test_neuron_devices_are_counted(chips, tmp_path):
    assert check_accelerators(SIXTEEN_CHIPS, devices=chips, neuron_ls=str(tmp_path / "none")) == "16 accelerators"
    (chips / "neuron7").unlink()
    with pytest.raises(StepFailed, match=r"15 accelerators, trn1.32xlarge has 16"):
        check_accelerators(SIXTEEN_CHIPS, devices=chips)


def test_neurons_own_tools_have_to_see_them_too(chips, program):
    tool = program("neuron-ls", said("neuron-ls-trn1.json"))
    assert check_accelerators(SIXTEEN_CHIPS, devices=chips, neuron_ls=str(tool)) == "16 accelerators"
    program("neuron-ls", "[]")
    with pytest.raises(StepFailed, match="neuron-ls shows 0 Neuron devices, the driver 16"):
        check_accelerators(SIXTEEN_CHIPS, devices=chips, neuron_ls=str(tool))
