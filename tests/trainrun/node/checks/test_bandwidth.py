"""The bandwidth of an all-reduce: a real one over gloo, and what nccl-tests prints."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.trainrun.node.checks.conftest import cluster_of
from trainrun.node.checks import bandwidth
from trainrun.node.checks.bandwidth import bus_bandwidth, check_bandwidth, find_nccl_tests, judge, measure
from trainrun.node.outcome import StepFailed
from trainrun.node.software import Software

SAID = """# nThread 1 nGpus 8 minBytes 1073741824 maxBytes 1073741824 step: 1048576(bytes) warmup iters: 5 iters: 20
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
  1073741824     268435456     float     sum      -1   3917.1  274.12  479.70      0   3915.4  274.23  479.91      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 479.805
"""


def test_two_processes_over_gloo_give_a_number():
    seen, source = measure(Software(sys.executable), ranks=2, size=4 * 1024**2, backend="gloo")
    assert 0.001 < seen < 1000 and source == "torch, gloo"


def test_a_rank_that_fails_ends_the_others():
    with pytest.raises(StepFailed, match=r"(?s)could not be measured \(status 1\).*rank [01]: "):
        measure(Software(sys.executable), ranks=2, size=4 * 1024**2, backend="no-such-backend")


def test_judged_against_a_figure():
    assert "437 are published" in judge(400.0, published=437.0, source="torch")
    with pytest.raises(StepFailed, match=r"reaches 300.0 GB/s .*and 349.6 are expected: 437 are published, 20% less"):
        judge(300.0, published=437.0, source="torch")


def test_without_a_figure_the_number_is_told_and_not_judged():
    assert "no figure is published to judge it by" in judge(0.1, published=None, source="torch")


def test_what_nccl_tests_print():
    assert bus_bandwidth(SAID) == 479.805
    with pytest.raises(StepFailed, match="found 3 wrong sums"):
        bus_bandwidth(SAID.replace("0 OK", "3 FAILED"))
    with pytest.raises(StepFailed, match="printed no bandwidth"):
        bus_bandwidth("segmentation fault")


def test_nccl_tests_of_the_newest_cuda_are_found(tmp_path):
    assert find_nccl_tests(root=tmp_path) is None
    for cuda in ("12.9", "13.0"):
        folder = tmp_path / f"usr/local/cuda-{cuda}/efa/test-cuda-{cuda}"
        folder.mkdir(parents=True)
        (folder / "all_reduce_perf").touch()
    assert "cuda-13.0" in str(find_nccl_tests(root=tmp_path))


def test_the_images_own_program_is_used(program, monkeypatch):
    tests = program("all_reduce_perf", SAID)
    monkeypatch.setattr(bandwidth, "find_nccl_tests", lambda: tests)
    eight = cluster_of(accelerator="nvidia", accelerators_per_node=8)
    assert check_bandwidth(Software(sys.executable), eight).startswith("all-reduce at 479.8 GB/s")
    with pytest.raises(StepFailed, match=r"800.0 are expected"):
        check_bandwidth(Software(sys.executable), eight, published=1000.0)


def test_as_a_job_it_measures_all_ranks_of_a_run():
    code = "from trainrun.bandwidth import main; import sys; sys.exit(main(size=1024**2))"
    script = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", sys.executable, "-c", code]
    done = subprocess.run([sys.executable, *script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("GB/s of bus bandwidth (2 ranks on 1 nodes, 1 MiB") == 1
