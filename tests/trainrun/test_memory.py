"""The memory model against published numbers, and against what the bundled GPT really keeps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainrun import memory
from trainrun.counts import shape_of_settings
from trainrun.data.batch import Batch
from trainrun.models.gpt import GPT
from trainrun.settings import ModelSettings

GB = 1e9
LLAMA_3_8B = 8_030_261_248
LLAMA_2_70B = 68_976_648_192
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp2"]


def on_device(strategy, parameters, ranks, **offload):
    return memory.model_states(strategy, parameters, ranks=ranks, precision="bf16", **offload).device / GB


@pytest.mark.parametrize(
    ("size", "text"), [(458e3, "0.458 MB"), (999.4e6, "999 MB"), (999.9e6, "1 GB"), (42.94e9, "42.9 GB"), (1234e9, "1,234 GB")]
)
def test_a_size_is_readable(size, text):
    assert memory.readable_size(size) == text


def test_ux_08_8b_on_8_devices_of_40_gib():
    device = 40 * 2**30 / GB
    assert on_device("zero1", LLAMA_3_8B, 8) == pytest.approx(44.2, abs=0.05)
    assert on_device("zero1", LLAMA_3_8B, 8) > device, "ZeRO-1 does not fit"
    assert on_device("zero2", LLAMA_3_8B, 8) == pytest.approx(30.1, abs=0.05)
    assert on_device("zero3", LLAMA_3_8B, 8) == pytest.approx(16.1, abs=0.05)
    assert on_device("fsdp2", LLAMA_3_8B, 8) == on_device("zero3", LLAMA_3_8B, 8)


@given(st.integers(1, 100_000))
def test_ux_08_70b_never_fits_80_gb_with_zero_2(ranks):
    assert on_device("zero2", LLAMA_2_70B, ranks) > 80


def test_ux_08_70b_on_128_ranks_with_zero_3():
    assert on_device("zero3", LLAMA_2_70B, 128) == pytest.approx(8.6, abs=0.05)


def test_the_papers_own_table():
    """Figure 1 of the ZeRO paper: 7.5 billion parameters on 64 devices."""
    sizes = [on_device(strategy, 7_500_000_000, 64) for strategy in STRATEGIES[:4]]
    assert sizes == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


@given(st.integers(1, 10**11), st.integers(1, 4096), st.sampled_from(["fp32", "bf16"]))
def test_every_stage_takes_no_more_than_the_one_before(parameters, ranks, precision):
    sizes = [memory.model_states(s, parameters, ranks=ranks, precision=precision).device for s in STRATEGIES[1:4]]
    assert sizes[0] >= sizes[1] * (1 - 1e-12)
    assert sizes[1] >= sizes[2] * (1 - 1e-12)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "fsdp2"])
def test_ux_05_what_is_offloaded_lies_on_the_host(strategy):
    kept = memory.model_states(strategy, LLAMA_3_8B, ranks=8)
    states = memory.model_states(strategy, LLAMA_3_8B, ranks=8, offload_optimizer="cpu", offload_parameters="cpu")
    share = LLAMA_3_8B / 8
    assert kept.host == 0
    assert states.device < kept.device
    assert 12 * share <= states.host
    # 16 for the update; the parameters themselves, which only stage 3 divides, come on top
    assert states.host <= (16 + 2 * (1 if strategy in ("zero3", "fsdp2") else 8)) * share


def test_ux_05_what_is_offloaded_to_disk_takes_no_memory():
    states = memory.model_states("zero3", LLAMA_3_8B, ranks=8, offload_optimizer="nvme", offload_parameters="nvme")
    assert (states.device, states.host) == (0, 0)


def kept_bytes(settings, precision, *, tokens):
    """What autograd keeps of one forward pass, parameters and their copies for autocast apart."""
    model = GPT(settings, vocabulary=50, context=tokens)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {tuple(parameter.shape) for parameter in model.parameters()} | {tuple(p.shape[::-1]) for p in model.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        copy = tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in shapes
        if storage.data_ptr() not in parameters and not copy:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept, so that no other takes its place
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.long)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        model.loss(Batch(ids, ids))
    return sum(size for size, _ in seen.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("norm_weights", [False, True])
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_activations_of_a_layer_are_within_a_sixth_of_what_autograd_keeps(activation, norm_weights, precision):
    sizes = {"width": 64, "heads": 4, "kv_heads": 2, "feed_forward": 176, "activation": activation, "norm_weights": norm_weights}
    tokens = 96
    one, three = (ModelSettings(layers=layers, **sizes) for layers in (1, 3))
    measured = (kept_bytes(three, precision, tokens=tokens) - kept_bytes(one, precision, tokens=tokens)) / 2
    shape = shape_of_settings(one, vocabulary=50)
    assert memory.activations(shape, tokens=tokens, precision=precision) == pytest.approx(measured, rel=1 / 6)


def test_recomputing_keeps_less():
    shape = shape_of_settings(ModelSettings(layers=8, width=256, heads=4), vocabulary=1000)
    sizes = [memory.activations(shape, tokens=100, checkpointing=mode) for mode in ("none", "selective", "full")]
    assert sizes[0] > sizes[1] > sizes[2]


def test_logits_take_what_the_vocabulary_says():
    shape = shape_of_settings(ModelSettings(), vocabulary=128_256)
    assert memory.logits(shape, tokens=8192) / GB == pytest.approx(12.6, abs=0.05)


def test_gathered_parameters_are_those_at_work():
    assert memory.gathered("zero2", 1000, largest_unit=100, outside=10) == 0
    assert memory.gathered("ddp", 1000, largest_unit=100, outside=10, precision="fp32") == 0
    assert memory.gathered("ddp", 1000, largest_unit=100, outside=10) == 2000, "autocast's copies"
    assert memory.gathered("fsdp2", 1000, largest_unit=100, outside=10) == 2 * 2 * 100 + 2 * 10 + 4 * 100
