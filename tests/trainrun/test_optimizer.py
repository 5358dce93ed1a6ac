"""The bundled optimizers: which parameters they update how. How they go with strategies is in `strategies/`."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainrun.config import ConfigError
from trainrun.data.batch import Batch
from trainrun.models.gpt import GPT
from trainrun.optimizer import adamw, bundled, muon
from trainrun.optimizer.adamw import FUSED
from trainrun.settings import ModelSettings, OptimizerSettings

MUON = OptimizerSettings(name="muon", learning_rate=0.02, weight_decay=0.3, momentum=0.9, beta2=0.9, epsilon=1e-3)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(ModelSettings(layers=2, width=16, heads=2, norm_weights=True, tied=False), vocabulary=50, context=8)


def batch(seed: int) -> Batch:
    rows = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(seed))
    return Batch(rows[:, :-1], rows[:, 1:])


def take_steps(model: GPT, *optimizers: torch.optim.Optimizer, steps: int = 3) -> dict[str, torch.Tensor]:
    for step in range(steps):
        model.loss(batch(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_adamw_decays_matrices_and_embeddings_but_not_vectors() -> None:
    model = gpt()
    optimizer = adamw(model, OptimizerSettings(weight_decay=0.3, beta1=0.8, beta2=0.9, epsilon=1e-3, learning_rate=0.02))
    names = {parameter: name for name, parameter in model.named_parameters()}
    matrices, vectors = ({names[p] for p in group["params"]} for group in optimizer.param_groups)
    assert {"embedding.weight", "head.weight", "blocks.0.attention.out.weight"} <= matrices
    assert vectors == {name for name in names.values() if name.endswith("norm.weight")}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert all((group["betas"], group["eps"], group["lr"]) == ((0.8, 0.9), 1e-3, 0.02) for group in optimizer.param_groups)


def test_adamw_leaves_out_what_does_not_train_and_has_no_empty_group() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    (group,) = adamw(model, OptimizerSettings()).param_groups
    assert group["params"] == [model[1].weight]


@pytest.mark.parametrize("device", ["cpu", "cuda", "neuron"])
def test_adamw_is_fused_where_the_device_has_it(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = None if device == "cpu" else SimpleNamespace(type=device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    (group,) = adamw(nn.Linear(2, 2, bias=False), OptimizerSettings()).param_groups
    assert group["fused"] is (True if device in FUSED else None)


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_all_else() -> None:
    """Step for step what PyTorch's two optimizers do on the same parameters."""
    model, twin = gpt(), gpt()
    optimizer = muon(model, MUON)
    inside = [p for name, p in twin.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
    matrices = [twin.embedding.weight, twin.head.weight]
    vectors = [p for p in twin.parameters() if p.dim() == 1]
    theirs = [
        torch.optim.Muon(inside, lr=0.02, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
            lr=0.02,
            betas=(0.9, 0.9),
            eps=1e-3,
            fused=True,
        ),
    ]
    before = copy.deepcopy(dict(model.named_parameters()))
    ours, expected = take_steps(model, optimizer), take_steps(twin, *theirs)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    assert not any(torch.equal(ours[name], before[name]) for name in expected), "all of them trained"


def test_muon_keeps_its_state_by_parameter_as_pytorch_does() -> None:
    model = gpt()
    optimizer = muon(model, MUON)
    take_steps(model, optimizer)
    by_name = {name: set(optimizer.state[parameter]) for name, parameter in model.named_parameters()}
    for name, keys in by_name.items():
        inside = name.startswith("blocks.") and model.get_parameter(name).dim() == 2
        assert keys == ({"momentum_buffer"} if inside else {"step", "exp_avg", "exp_avg_sq"}), name


def test_muon_goes_on_from_state_that_was_put_back() -> None:
    model = gpt()
    optimizer = muon(model, MUON)
    take_steps(model, optimizer)
    twin = copy.deepcopy(model)
    other = muon(twin, MUON)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ours, restored = take_steps(model, optimizer), take_steps(twin, other)
    assert all(torch.equal(ours[name], restored[name]) for name in ours)


def test_muon_follows_the_learning_rate_of_its_groups() -> None:
    model = gpt()
    optimizer = muon(model, MUON)
    before = copy.deepcopy(dict(model.named_parameters()))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    after = take_steps(model, optimizer, steps=1)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_model_without_blocks_is_refused_by_muon() -> None:
    with pytest.raises(ConfigError, match="Linear has 0 matrices inside its repeated blocks and 2 other parameters"):
        bundled(nn.Linear(2, 2), MUON)


def test_the_optimizer_that_the_settings_name_is_made_or_said_not_to_be() -> None:
    assert isinstance(bundled(gpt(), OptimizerSettings()), torch.optim.AdamW)
    assert not isinstance(bundled(gpt(), MUON), torch.optim.AdamW)
    with pytest.raises(ConfigError, match=r"optimizer.name is 'muon', but this script makes AdamW. .*bundled\(model, settings\)"):
        adamw(gpt(), MUON)
    with pytest.raises(ConfigError, match=r"optimizer.name is 'adamw', but this script makes Muon"):
        muon(gpt(), OptimizerSettings())
