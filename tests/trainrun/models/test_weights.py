"""Models without memory, and where their weights come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from trainrun.config import ConfigError
from trainrun.models.gpt import GPT
from trainrun.models.weights import (
    InitialWeights,
    SafetensorsWeights,
    give_memory,
    on_meta,
    parameters_without_memory,
    weights_of,
)
from trainrun.settings import ModelSettings


def test_a_model_without_memory_becomes_the_one_that_was_made_at_once_and_its_optimizer_knows_it() -> None:
    settings = ModelSettings(layers=1, width=16, heads=2)
    torch.manual_seed(0)
    eager = GPT(settings, vocabulary=20, context=8)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(settings, vocabulary=20, context=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert on_meta(model)
    give_memory(model, weights_of(model, None), torch.device("cpu"))
    assert not on_meta(model)
    assert set(model.state_dict()) == set(eager.state_dict())  # the buffers are still not part of it
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens), eager(tokens))
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))


def test_a_model_of_others_keeps_its_buffers_and_its_ties() -> None:
    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight
            self.register_buffer("computed", torch.arange(3.0), persistent=False)

    with parameters_without_memory():
        model = Theirs()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.computed.tolist() == [0, 1, 2]
    drawn = {"a.weight": torch.ones(3, 3), "a.bias": torch.zeros(3), "b.bias": torch.zeros(3)}
    give_memory(model, SafetensorsWeights({}, drawn), torch.device("cpu"))
    assert model.b.weight is model.a.weight
    assert model.b(torch.ones(3)).tolist() == [3, 3, 3]
    assert not nn.Linear(2, 2).weight.is_meta  # outside of the context all is as always


def test_parts_of_files_are_read_in_fp32(tmp_path: Path) -> None:
    stored = torch.randn(6, 4)
    save_file({"w": stored.bfloat16(), "scalar": torch.tensor(2.5)}, tmp_path / "a.safetensors")
    weights = SafetensorsWeights(
        {"layer.w": (tmp_path / "a.safetensors", "w"), "s": (tmp_path / "a.safetensors", "scalar")}, {"new": torch.arange(4.0)}
    )
    assert torch.equal(weights.read("layer.w"), stored.bfloat16().float())
    assert torch.equal(weights.read("layer.w", (slice(2, 4), slice(1, 3))), stored.bfloat16().float()[2:4, 1:3])
    assert torch.equal(weights.read("layer.w", (slice(0, 2),)), stored.bfloat16().float()[:2])
    assert weights.read("s").item() == 2.5
    assert weights.read("new", (slice(1, 3),)).tolist() == [1, 2]


def test_initial_weights_are_cut_too() -> None:
    gpt = GPT(ModelSettings(layers=1, width=16, heads=2), vocabulary=20, context=8)
    part = InitialWeights(gpt).read("embedding.weight", (slice(3, 5), slice(0, 16)))
    assert torch.equal(part, gpt.embedding.weight[3:5])


def test_a_model_without_memory_and_weights_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"\(Linear\) is on the meta device and has no weights"):
        weights_of(model, None)


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.randn(100)}, path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read as safetensors"):
        SafetensorsWeights({"w": (path, "w")}).read("w")
