"""The job's Python: a real one, and ones whose torch is a stand-in that shows accelerators."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.trainrun.node.checks.conftest import cluster_of, said
from trainrun.node.checks.python import ask_python, check_python, needs_torch
from trainrun.node.outcome import StepFailed
from trainrun.node.software import Software
from trainrun.spec import JobSpec

CPU = cluster_of("c7i.large")
TWO_GPUS = cluster_of("p5.48xlarge", accelerator="nvidia", accelerators_per_node=2)

# A torch of whole numbers in lists. What its devices do is in DEVICES: "well", "wrong", "error" or "hang".
TORCH = """
import os, time
__version__ = "2.13.0+cu128"
DEVICES = os.environ["STAND_IN_DEVICES"].split()
class version:
    cuda = "12.8"
class cuda:
    is_available = staticmethod(lambda: bool(DEVICES))
    class nccl:
        version = staticmethod(lambda: (2, 26, 2))
    @staticmethod
    def init():
        raise RuntimeError("CUDA error 802: system not yet initialized")
class Kind:
    type = "cuda"
class accelerator:
    is_available = staticmethod(lambda: bool(DEVICES))
    current_accelerator = staticmethod(lambda: Kind)
    device_count = staticmethod(lambda: len(DEVICES))
class Matrix:
    def __init__(self, does="well", value=0):
        self.does, self.value = does, value
    float = cpu = lambda self: self
    def to(self, device):
        return Matrix(DEVICES[int(device.partition(":")[2])])
    def __matmul__(self, other):
        if self.does == "error":
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        if self.does == "hang":
            time.sleep(60)
        return Matrix(value=1 if self.does == "wrong" else 0)
    def __ne__(self, other):
        return Matrix(value=self.value - other.value)
    def sum(self):
        return self.value
class Generator:
    def manual_seed(self, seed):
        return self
def randint(*args, generator):
    return Matrix()
"""


@pytest.fixture
def python_with(tmp_path, monkeypatch, program):
    """python_with(devices): a Python whose torch shows such devices, beside a driver that goes up to CUDA 12.8."""

    def make(devices):
        (tmp_path / "torch.py").write_text(TORCH)
        monkeypatch.setenv("STAND_IN_DEVICES", devices)
        program("nvidia-smi", said("nvidia-smi.txt"))
        return Software(str(program("python", f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')))

    return make


def test_the_real_torch_of_this_machine():
    assert check_python(Software(sys.executable), CPU).startswith("torch 2.")


def test_gpus_that_compute_are_told_with_versions(python_with):
    found = check_python(python_with("well well"), TWO_GPUS)
    assert found.startswith("torch 2.13.0+cu128, CUDA 12.8, right products on 2 accelerators in 0.")


@pytest.mark.parametrize(
    ("does", "seen"),
    [("wrong", "differs from the CPU's in 1 elements"), ("error", "failed: RuntimeError: CUDA error: uncorrectable ECC error")],
)
def test_the_gpu_that_does_not_compute_is_named(does, seen, python_with):
    with pytest.raises(StepFailed) as failure:
        check_python(python_with(f"well {does}"), TWO_GPUS)
    assert f"1024 x 1024 on cuda:1 {seen}" in str(failure.value)
    assert "Replace the instance" in str(failure.value) and "cuda:0" not in str(failure.value)


def test_a_gpu_that_hangs_is_named_in_a_bounded_time(python_with):
    found = ask_python(python_with("hang well"), patience=0.5)
    assert list(found.products) == ["cuda:1"]


def test_boot_03_gpus_that_cuda_cannot_start_are_told_with_its_error(python_with):
    with pytest.raises(StepFailed, match=r"can use 0 accelerators \(RuntimeError: CUDA error 802.*p5.48xlarge has 2"):
        check_python(python_with(""), TWO_GPUS)


def test_fewer_gpus_than_the_type_has(python_with):
    with pytest.raises(StepFailed, match=r"can use 1 accelerator, and p5.48xlarge has 2\..*CUDA_VISIBLE_DEVICES"):
        check_python(python_with("well"), TWO_GPUS)


def test_all_faults_of_torch_are_told_together(python_with):
    with pytest.raises(StepFailed) as failure:
        check_python(python_with("wrong"), cluster_of("p6-b300.48xlarge", accelerator="nvidia", accelerators_per_node=8))
    text = str(failure.value)
    assert "CUDA 12.8, and p6-b300.48xlarge needs 13.0" in text
    assert "NCCL 2.26.2, and p6-b300.48xlarge needs 2.28.3" in text
    assert "can use 1 accelerator" in text and "on cuda:0 differs" in text


def test_a_torch_without_cuda_on_a_gpu_node(program):
    program("nvidia-smi", said("nvidia-smi.txt"))
    with pytest.raises(StepFailed, match="It was built without CUDA: take a build with CUDA"):
        check_python(Software(sys.executable), TWO_GPUS)


def test_a_python_without_torch_is_named_with_its_error(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(StepFailed, match=r"(?s)cannot import torch.*libcudart.so.12.*Set the job's python"):
        check_python(Software(str(python)), CPU)


def test_an_import_that_does_not_end(program):
    python = program("python", "#!/bin/sh\nexec sleep 30\n")
    with pytest.raises(StepFailed, match=r"to import torch: it did not end within 0.2 s"):
        ask_python(Software(str(python)), timeout=0.2)


def test_no_such_python():
    with pytest.raises(StepFailed, match="/nonexistent/python cannot be run"):
        check_python(Software("/nonexistent/python"), CPU)


def test_it_is_run_as_the_jobs_software_runs_programs(tmp_path):
    class InSomethingElse(Software):
        def command(self, argv, environment=None):
            return ["env", f"FROM={tmp_path}", *argv]

        def environment(self, base):
            return {**base, "STAND_IN_DEVICES": "", "PYTHONPATH": str(tmp_path)}

    (tmp_path / "torch.py").write_text(TORCH.replace('"2.13.0+cu128"', 'os.environ["FROM"]'))
    assert ask_python(InSomethingElse(sys.executable)).torch == str(tmp_path)


@pytest.mark.parametrize(
    ("launcher", "entry_point", "needed"),
    [("torchrun", "train.py", True), ("mpirun", "train.py", True), ("mpirun", "/usr/local/bin/all_reduce_perf", False)],
)
def test_programs_under_mpirun_need_no_torch(launcher, entry_point, needed):
    assert needs_torch(JobSpec(entry_point=entry_point, launcher=launcher)) is needed


def test_what_a_node_runs_imports_nothing_of_trainrun():
    from trainrun.node.checks import allreduce_program, torch_program

    for program in (torch_program, allreduce_program):
        assert "trainrun" not in [line.split()[1].partition(".")[0] for line in imports(Path(program.__file__))]


def imports(path):
    return [line for line in map(str.strip, path.read_text().splitlines()) if line.startswith(("import ", "from "))]
