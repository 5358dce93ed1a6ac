"""FLOPs per token, and what devices can do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainrun.metrics.flops import flops_of, peak_flops
from trainrun.models.gpt import GPT
from trainrun.settings import ModelSettings


@pytest.mark.parametrize("tied", [True, False])
def test_the_gpt_counts_its_matrix_products(tied: bool) -> None:
    """Counted from the shapes of the products as written down, and not from the parameters."""
    layers, width, vocabulary, length = 3, 64, 257, 32
    gpt = GPT(ModelSettings(layers=layers, width=width, heads=4, tied=tied), vocabulary=vocabulary, context=length)
    attention = 4 * width * width  # queries, keys, values, output
    feed_forward = 2 * 4 * width * width
    products = layers * (attention + feed_forward) + width * vocabulary
    scores_and_mix = 2 * layers * length * width  # each query with each position, without a discount for the causal half
    flops = flops_of(gpt, sequence_length=length)
    assert flops.per_token == 3 * 2 * (products + scores_and_mix)  # forward once, backward twice; 2 a multiply-add
    assert flops.convention == "6N+12Lhs"


def test_a_model_of_the_users_counts_six_a_parameter_or_as_it_says() -> None:
    flops = flops_of(nn.Linear(10, 10, bias=False), sequence_length=7)
    assert (flops.per_token, flops.convention) == (600, "6P")

    class Own(nn.Linear):
        flops_convention = "mine"

        def flops_per_token(self, sequence_length: int) -> float:
            return 3.0 * sequence_length

    own = flops_of(Own(10, 10), sequence_length=7)
    assert (own.per_token, own.convention) == (21, "mine")


def test_models_on_the_meta_device_count_alike() -> None:
    with torch.device("meta"):
        gpt = GPT(ModelSettings(), vocabulary=300, context=64)
    assert flops_of(gpt, sequence_length=64) == flops_of(GPT(ModelSettings(), vocabulary=300, context=64), sequence_length=64)


@pytest.mark.parametrize(
    ("device", "precision", "tf32", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", "bf16", False, 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", False, 19.5e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", True, 156e12),
        ("NVIDIA H100 80GB HBM3", "fp8", False, 1979e12),
        ("NVIDIA H200", "bf16", True, 989e12),
        ("NVIDIA B200", "fp16", False, 2250e12),
        ("NVIDIA GB200", "bf16", False, 2500e12),
        ("NVIDIA L4", "bf16", False, 121e12),
        ("NVIDIA L40S", "bf16", False, 362e12),
        ("NVIDIA L4", "fp32", True, 60e12),
        ("NVIDIA A10G", "bf16", False, None),
        ("NVIDIA B200", "fp32", True, None),
        ("Tesla V100-SXM2-16GB", "fp16", False, 125e12),
        ("Tesla T4", "fp32", True, None),
        ("Tesla V100-SXM2-16GB", "bf16", False, None),
        ("NVIDIA A100-SXM4-80GB", "fp8", False, None),
        ("NVIDIA H100 PCIe", "bf16", False, None),
        ("NVIDIA H100 NVL", "bf16", False, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", False, None),
        ("NVIDIA A10", "bf16", False, None),
        ("NVIDIA L40", "bf16", False, None),
        ("NVIDIA B300 SXM6 AC", "bf16", False, None),
        ("neuron", "bf16", False, None),
        ("cpu", "fp32", False, None),
    ],
)
def test_peaks_are_those_of_the_very_device_or_none(device: str, precision: str, tf32: bool, peak: float | None) -> None:
    assert peak_flops(device, precision=precision, tf32=tf32) == peak  # type: ignore[arg-type]
