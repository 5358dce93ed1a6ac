"""EFA interfaces."""

from __future__ import annotations

import resource

import pytest

from tests.trainrun.node.checks.conftest import cluster_of, said
from trainrun.node.checks.efa import check_efa, check_locked_memory
from trainrun.node.outcome import StepFailed


@pytest.fixture
def kernel_shows(tmp_path):
    def make(count):
        folder = tmp_path / "infiniband"
        folder.mkdir()
        for index in range(count):
            (folder / f"rdmap{79 + index}s0").mkdir()
        return folder

    return make


def test_kernel_and_libfabric_show_all(kernel_shows, program):
    fi_info = program("fi_info", said("fi_info-p5.txt"))
    assert check_efa(cluster_of(efa_interfaces=32), infiniband=kernel_shows(32), fi_info=str(fi_info)) == "32 EFA interfaces"


def test_fewer_in_the_kernel(kernel_shows):
    with pytest.raises(StepFailed, match=r"shows 2 EFA interfaces .fi_info: 0., the launch template asks for 32"):
        check_efa(cluster_of(efa_interfaces=32), infiniband=kernel_shows(2), fi_info="/nonexistent")


def test_fewer_in_libfabric(kernel_shows, program):
    fi_info = program("fi_info", "provider: efa\n    domain: rdmap79s0-rdm")
    with pytest.raises(StepFailed, match=r"fi_info shows 1 EFA interfaces, .* asks for 2 and the kernel has them"):
        check_efa(cluster_of(efa_interfaces=2), infiniband=kernel_shows(2), fi_info=str(fi_info))


def test_without_fi_info_the_kernel_has_to_do(kernel_shows):
    found = check_efa(cluster_of(efa_interfaces=2), infiniband=kernel_shows(2), fi_info="/nonexistent")
    assert found == "2 EFA interfaces (/nonexistent tells nothing)"


def test_none_expected(tmp_path):
    assert check_efa(cluster_of(), infiniband=tmp_path / "none") == "no EFA expected"


def test_memory_that_cannot_be_locked(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    assert check_locked_memory(cluster_of()) == "no locked memory needed"
    with pytest.raises(StepFailed, match=r"At most 65536 bytes .* LimitMEMLOCK=infinity"):
        check_locked_memory(cluster_of(efa_interfaces=1))
