"""The device seam, with stand-ins for CUDA and Neuron: neither is on this machine, so what is shown is who is asked for what."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainrun import devices, ranks
from trainrun.config import ConfigError

CPU = torch.device("cpu")


class Accelerator:
    """Answers for `torch.accelerator` as eight devices of one type would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, count: int = 8) -> None:
        self.index: int | None = None
        self.calls: list[tuple[Any, ...]] = []
        answers = {
            "is_available": lambda: True,
            "current_accelerator": lambda: SimpleNamespace(type=kind),
            "device_count": lambda: count,
            "set_device_index": lambda index: setattr(self, "index", index),
            "get_memory_info": lambda device: (20, 100),
            "memory_reserved": lambda device: 30,
            "memory_allocated": lambda device: 25,
            "max_memory_allocated": lambda device: 70,
            "reset_peak_memory_stats": lambda device: self.calls.append(("reset", device)),
            "synchronize": lambda device: self.calls.append(("synchronize", device)),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.accelerator, name, answer)
        if kind == "neuron":  # what importing the vendor's package does
            monkeypatch.setattr(torch, "device", lambda kind, index=0: SimpleNamespace(type=kind, index=index))
            monkeypatch.setattr(dist, "get_default_backend_for_device", lambda device: "neuron")


@pytest.fixture(params=["cuda", "neuron"])
def accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Accelerator]:
    return request.param, Accelerator(monkeypatch, request.param)


def test_a_rank_takes_the_device_of_its_own_number(accelerator: tuple[str, Accelerator]) -> None:
    kind, fake = accelerator
    device = devices.of_rank(local_rank=3, local_size=8)
    assert (device.type, device.index, fake.index) == (kind, 3, 3)


def test_memory_is_asked_of_the_accelerator(accelerator: tuple[str, Accelerator]) -> None:
    _, fake = accelerator
    device = devices.of_rank(local_rank=0, local_size=8)
    assert devices.memory(device, local_size=8) == devices.Memory(total=100, free=25)  # 5 are cached, not used
    assert (devices.peak_bytes(device), devices.allocated_bytes(device)) == (70, 25)
    devices.reset_peak(device)
    devices.synchronize(device)
    assert fake.calls == [("reset", device), ("synchronize", device)]


@pytest.mark.parametrize(("kind", "expected"), [("cuda", "cpu:gloo,cuda:nccl"), ("neuron", "cpu:gloo,neuron:neuron")])
def test_collectives_of_an_accelerator_are_its_own(monkeypatch: pytest.MonkeyPatch, kind: str, expected: str) -> None:
    Accelerator(monkeypatch, kind)
    assert devices.backend(devices.of_rank(local_rank=0, local_size=1)) == expected


def test_a_device_without_collectives_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no backend for meta devices"):
        devices.backend(torch.device("meta"))


def test_fewer_accelerators_than_ranks_is_an_error_with_the_numbers(
    accelerator: tuple[str, Accelerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, fake = accelerator
    for name, value in {"RANK": "9", "WORLD_SIZE": "18", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "9"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"shows 8 {kind} devices to 9 ranks.*--nproc-per-node=8"):
        ranks.join(timeout_seconds=1, storage_timeout_seconds=1)
    assert fake.index is None


def test_names_come_from_the_driver_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(get_device_name=lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert devices.name(torch.device("cuda", 0)) == "NVIDIA H200"
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert devices.name(torch.device("cuda", 0)) == "cuda"
    assert devices.name(CPU) == "cpu"


def test_ranks_on_a_cpu_share_the_machine() -> None:
    assert devices.of_rank(local_rank=5, local_size=8) == CPU
    assert devices.backend(CPU) == "gloo"
    whole, quarter = devices.memory(CPU, local_size=1), devices.memory(CPU, local_size=4)
    assert quarter.total == whole.total // 4
    assert 0 < whole.free < whole.total
    held = torch.ones(64 * 1024**2, dtype=torch.uint8)
    assert held.numel() < devices.peak_bytes(CPU) < whole.total


def test_a_failed_allocation_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(10**15)
    assert devices.is_out_of_memory(failed.value)
    assert devices.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not devices.is_out_of_memory(RuntimeError("shapes differ"))


def test_the_time_out_of_every_group_changes_those_of_meshes_too_but_not_that_of_the_storage() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        control, storage, of_a_mesh = (dist.new_group(backend="gloo", timeout=timedelta(seconds=n)) for n in (1, 2, 3))
        two = ranks.Ranks(0, 2, 0, CPU, control, storage)  # a rank that is alone has no time-outs
        two.set_timeout(7)
        groups = (dist.group.WORLD, control, storage, of_a_mesh)
        assert [group._get_backend(CPU).options._timeout.total_seconds() for group in groups] == [7, 7, 2, 7]
    finally:
        dist.destroy_process_group()
