"""Precisions: the loss scale of fp16, and formats that only some hardware has."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from trainrun import precision
from trainrun.config import ConfigError
from trainrun.precision import LossScale
from trainrun.settings import TrainSettings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_loss_scale_halves_at_an_overflow_and_doubles_after_steps_without() -> None:
    scale = LossScale()
    scale.update(finite=False)
    assert scale.value == LossScale.FIRST / 2
    for _ in range(LossScale.INTERVAL - 1):
        scale.update(finite=True)
    assert scale.value == LossScale.FIRST / 2
    scale.update(finite=True)
    assert scale.value == LossScale.FIRST


def test_an_overflow_starts_the_count_of_steps_anew() -> None:
    scale = LossScale()
    for finite in [True] * (LossScale.INTERVAL - 1) + [False] + [True] * (LossScale.INTERVAL - 1):
        scale.update(finite=finite)
    assert scale.value == LossScale.FIRST / 2


def test_a_restored_loss_scale_goes_on_where_it_was() -> None:
    one, other = LossScale(), LossScale()
    for finite in [False, *[True] * (LossScale.INTERVAL - 1)]:
        one.update(finite=finite)
    other.load_state(one.state())
    other.update(finite=True)
    assert other.value == LossScale.FIRST


def test_a_gradient_that_is_never_finite_ends_the_run_instead_of_skipping_for_ever() -> None:
    scale = LossScale()
    with pytest.raises(FloatingPointError, match=r"not finite even with a loss scale of 0\.00097.*: training has diverged"):
        for _ in range(100):
            scale.update(finite=False)


def test_tf32_is_refused_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match=r"tf32 is true, but .* this rank computes on the CPU\. Set"):
        precision.set_tf32(TrainSettings(tf32=True), CPU)


@pytest.mark.parametrize(("tf32", "expected"), [(True, "high"), (False, "highest")])
def test_tf32_is_switched_on_and_off_on_gpus_that_have_it(tf32: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    precision.set_tf32(TrainSettings(tf32=tf32), CUDA)
    assert chosen == [expected]


def test_fp8_is_refused_on_a_cpu_and_on_an_older_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r'needs an NVIDIA GPU of compute capability 8\.9 or later .* the CPU\. Set .* "bf16"'):
        precision.convert_to_fp8([], CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    with pytest.raises(ConfigError, match="computes on NVIDIA A100-SXM4-40GB"):
        precision.convert_to_fp8([], CUDA)


def test_fp8_needs_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match="needs torchao: pip install"):
        precision.convert_to_fp8([], CUDA)


def test_fp8_is_for_linear_layers_with_sides_that_the_hardware_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao is played by a stand-in with its signature: what it does needs a GPU."""
    chosen: list[str] = []

    def convert_to_float8_training(module: nn.Module, *, module_filter_fn: object) -> nn.Module:
        chosen.extend(name for name, child in module.named_modules() if module_filter_fn(child, name))
        return module

    stand_in = types.SimpleNamespace(convert_to_float8_training=convert_to_float8_training)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "torchao", types.SimpleNamespace(float8=stand_in))
    monkeypatch.setitem(sys.modules, "torchao.float8", stand_in)
    unit = nn.ModuleDict(
        {"fits": nn.Linear(32, 16), "inputs": nn.Linear(20, 16), "outputs": nn.Linear(16, 20), "norm": nn.LayerNorm(16)}
    )
    precision.convert_to_fp8([unit], CUDA)
    assert chosen == ["fits"]
    with pytest.raises(ConfigError, match=r"have no nn\.Linear whose sides are multiples of 16"):
        precision.convert_to_fp8([unit["inputs"]], CUDA)
