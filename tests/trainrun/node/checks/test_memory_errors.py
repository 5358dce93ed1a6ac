"""Errors of GPU memory."""

from __future__ import annotations

import pytest

from tests.trainrun.node.checks.conftest import cluster_of
from trainrun.node.checks.memory_errors import check_memory_errors
from trainrun.node.outcome import StepFailed

GPUS = cluster_of(accelerator="nvidia", accelerators_per_node=2)


def test_sound_memory(program):
    program("nvidia-smi", "0, 0, No, No\n1, 0, No, No")
    assert check_memory_errors(GPUS) == "no memory errors on 2 GPUs"


@pytest.mark.parametrize("row", ["1, [N/A], [N/A], [N/A]", "1, 0, 0, 0"])
def test_a_gpu_without_such_counters_has_no_errors(row, program):
    program("nvidia-smi", f"0, 0, No, No\n{row}")
    assert check_memory_errors(GPUS) == "no memory errors on 2 GPUs"


def test_a_driver_without_the_query_is_told(no_programs):
    assert "tells nothing" in check_memory_errors(GPUS)


def test_each_error_is_named_with_its_gpu(program):
    program("nvidia-smi", "0, 2, No, No\n1, 0, Yes, No")
    with pytest.raises(StepFailed) as failure:
        check_memory_errors(GPUS)
    assert "GPU 0: ecc.errors.uncorrected.volatile.total is 2" in str(failure.value)
    assert "GPU 1: remapped_rows.failure is Yes" in str(failure.value)
    assert "Replace the instance" in str(failure.value)
