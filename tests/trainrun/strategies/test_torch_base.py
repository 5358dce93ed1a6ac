"""What the strategies of PyTorch refuse, and what their update does to the host."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainrun.config import ConfigError
from trainrun.ranks import Ranks, leave
from trainrun.settings import TrainSettings
from trainrun.strategies.base import Strategy
from trainrun.strategies.choose import strategy_of
from trainrun.strategies.divisible import indivisible

ALONE = Ranks(0, 1, 0, torch.device("cpu"), None, None)


def model(frozen: bool = False) -> nn.Sequential:
    made = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))
    made[0][0].weight.requires_grad_(not frozen)
    return made


def strategy(**settings: Any) -> Strategy:
    return strategy_of(TrainSettings(**{"strategy": "ddp", **settings}), ALONE)


def test_an_optimizer_with_state_is_refused() -> None:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    made(torch.ones(4)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match=r"has state already: its steps were taken on other tensors\. Give a new one"):
        strategy().prepare(made, optimizer)


def test_an_optimizer_over_another_model_is_refused_with_all_that_is_wrong() -> None:
    made = model()
    other = nn.Linear(4, 3)
    with pytest.raises(ConfigError) as error:
        strategy().prepare(made, torch.optim.SGD([other.weight, *list(made.parameters())[1:]]))
    foreign, missing = error.value.problems
    assert "has 1 parameters that the model has not, of shapes (3, 4)" in foreign
    assert "1 parameters of the model require gradients but are not in the optimizer: 0.0.weight. Add them, or freeze" in missing


def test_frozen_parameters_need_not_be_in_the_optimizer() -> None:
    made = model(frozen=True)
    optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=0.1)
    prepared = strategy()
    prepared.prepare(made, optimizer)
    before = made[0][0].weight.clone()
    prepared.backward(prepared.call("__call__", (torch.ones(4),), {}, last=True).sum(), last=True)
    prepared.update(optimizer, clip_norm=1.0)
    assert torch.equal(made[0][0].weight, before)


@pytest.mark.parametrize("name", ["fsdp2", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("parameter", "sentence"),
    [
        (torch.tensor(1.0), r"have no dimension to divide; give them the shape \(1,\), or set strategy to ddp, .*: logit_scale"),
        (torch.ones(2, dtype=torch.complex64), r"are complex; make them of real numbers.*: logit_scale\."),
        (torch.ones(0), r"have no elements; remove them, .*: logit_scale\."),
    ],
)
def test_parameters_that_cannot_be_divided_are_refused(name: str, parameter: Tensor, sentence: str) -> None:
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    made = model()
    made.register_parameter("logit_scale", nn.Parameter(parameter))
    if not parameter.numel() and name != "zero3":
        assert indivisible(made, name) == []
        return
    try:
        with pytest.raises(ConfigError, match=sentence):
            strategy(strategy=name).prepare(made, torch.optim.SGD(made.parameters()))
    finally:
        leave()  # DeepSpeed makes a group of one


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"compile": True}, "compile"), ({"activation_checkpointing": "full"}, "activation_checkpointing")],
)
def test_what_works_on_repeated_layers_needs_some(settings: dict[str, Any], named: str) -> None:
    flat = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(ConfigError, match=f"{named} works on a model's repeated layers, and Sequential has none"):
        strategy(**settings).prepare(flat, torch.optim.SGD(flat.parameters()))


def test_compiling_without_a_compiler_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    made = model()
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler \(no-such-compiler is not on PATH\).*or set compile to false"):
        strategy(compile=True).prepare(made, torch.optim.SGD(made.parameters()))


def test_weights_that_train_are_fp32_whatever_the_model_was_made_in() -> None:
    made = model().bfloat16()
    optimizer = torch.optim.SGD(made.parameters())
    strategy(precision="bf16").prepare(made, optimizer)
    assert {p.dtype for p in made.parameters()} == {torch.float32}
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in made.parameters()]


class Tied(nn.Module):
    """Input and output share their weights; a buffer scales the output. Weights and buffer are known by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.empty(1), persistent=False)
        self.shapes = {name: tensor.shape for name, tensor in (*self.named_parameters(), *self.named_buffers())}
        if not self.scale.is_meta:
            with torch.no_grad():
                for name, tensor in (*self.named_parameters(), *self.named_buffers()):
                    tensor.copy_(self.initial(name))

    def initial(self, name: str) -> Tensor:
        return torch.arange(math.prod(self.shapes[name]), dtype=torch.float32).add(len(name)).sin().view(self.shapes[name])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x) * self.scale


@pytest.mark.parametrize("meta", [False, True])
def test_tied_weights_and_buffers_are_alike_in_every_strategy(meta: bool) -> None:
    losses = []
    for name in ("ddp", "fsdp2"):
        with torch.device("meta" if meta else "cpu"):
            made = Tied()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        prepared = strategy(strategy=name)
        prepared.prepare(made, optimizer)
        assert made.head.weight is made.embedding.weight
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in made.parameters()]
        for _ in range(3):
            loss = prepared.call("__call__", (torch.arange(6),), {}, last=True).square().sum()
            prepared.backward(loss, last=True)
            prepared.update(optimizer, clip_norm=1.0)
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    assert losses[0] > losses[1] > losses[2]


def test_after_an_evaluation_shards_are_shards_again() -> None:
    made = Tied()
    prepared = strategy(strategy="fsdp2")
    prepared.prepare(made, torch.optim.SGD(made.parameters()))
    with torch.no_grad():
        prepared.call("__call__", (torch.arange(6),), {}, last=True)
    assert {type(parameter) for parameter in made.parameters()} == {DTensor}


class HostReads(TorchDispatchMode):
    """Counts how often a tensor's value goes to the host, which on an accelerator waits for the device."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clip_norm", [1.0, math.inf])
def test_a_step_does_not_wait_for_the_device(name: str, precision: str, clip_norm: float) -> None:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), fused=True)
    prepared = strategy(strategy=name, precision=precision)
    prepared.prepare(made, optimizer)
    with HostReads() as reads:
        for _ in range(2):
            prepared.backward(prepared.call("__call__", (torch.ones(4),), {}, last=True).sum(), last=True)
            prepared.update(optimizer, clip_norm=clip_norm)
    assert reads.count == 0


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_nothing_of_a_step_is_left_for_the_next(name: str) -> None:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
    prepared = strategy(strategy=name)
    prepared.prepare(made, optimizer)
    norms = []
    for _ in range(2):
        prepared.backward(prepared.call("__call__", (torch.ones(4),), {}, last=True).sum(), last=True)
        norms.append(float(prepared.update(optimizer, clip_norm=0.1)))
    assert norms[0] == norms[1] > 0.1  # before clipping


def test_ddp_imports_neither_deepspeed_nor_a_compiler() -> None:
    code = """
import sys
import torch
from trainrun.ranks import Ranks, leave
from trainrun.settings import TrainSettings
from trainrun.strategies.choose import strategy_of
from trainrun.strategies.divisible import indivisible
strategy_of(TrainSettings(strategy="ddp"), Ranks(0, 1, 0, torch.device("cpu"), None, None))
print([name for name in ("deepspeed", "transformers", "torch._inductor") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
