"""What the units of a model are, and that they are recomputed without changing anything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainrun.models.gpt import GPT
from trainrun.settings import ModelSettings
from trainrun.strategies.recompute import recompute
from trainrun.strategies.units import units


class Layer(nn.Module):
    """A layer that counts how often its parts are computed."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.product = nn.Linear(4, 4)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.dropout(self.product(x).tanh())


class Stack(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.layers = layers
        self.project = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


def test_units_are_the_repeated_layers() -> None:
    layers = nn.ModuleList([Layer(), Layer()])
    assert units(Stack(layers)) == list(layers)  # and not what is in a list because it comes one after the other
    assert units(nn.Sequential(Layer(), Layer()))[0].product.in_features == 4
    gpt = GPT(ModelSettings(layers=1, width=8, heads=2), vocabulary=5, context=4)
    assert units(gpt) == list(gpt.blocks)


def test_units_are_the_outermost_lists_and_each_layer_is_one_unit() -> None:
    shared = Layer()
    shared.inner = nn.ModuleList([Layer()])
    assert units(Stack(nn.ModuleList([shared, shared]))) == [shared]


def test_a_model_without_repeated_layers_has_no_units() -> None:
    assert units(nn.Sequential(nn.Linear(4, 4), nn.ReLU())) == []
    assert units(Stack(nn.ModuleList([]))) == []


@pytest.mark.parametrize("selective", [False, True])
def test_recomputing_changes_no_number_and_no_name(selective: bool) -> None:
    def gradients(recomputed: bool) -> tuple[list[str], int, dict[str, Tensor]]:
        torch.manual_seed(0)
        layers = [Layer(dropout=0.5), Layer(dropout=0.5)]
        model = nn.Sequential(*layers)
        if recomputed:
            recompute(layers, selective=selective)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.randn(3, 4)).square().sum().backward()
        return list(model.state_dict()), layers[0].calls, {name: p.grad for name, p in model.named_parameters()}

    names, calls, expected = gradients(False)
    names_then, calls_then, found = gradients(True)
    assert names_then == names
    assert (calls, calls_then) == (1, 2)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


class Products(TorchDispatchMode):
    """Counts the matrix products that are computed."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("selective", "again"), [(False, 1), (True, 0)])
def test_selective_recomputation_keeps_matrix_products(selective: bool, again: int) -> None:
    layer = Layer()
    recompute([layer], selective=selective)
    loss = layer(torch.randn(3, 4, requires_grad=True)).sum()
    with Products() as products:
        loss.backward()
    assert layer.calls == 2
    assert products.count == 2 + again  # the gradients of input and of weight; and the layer's own
