"""The bundled GPT."""

from __future__ import annotations

import math

import pytest
import torch

from trainrun.data.batch import IGNORED, Batch
from trainrun.models.gpt import GPT
from trainrun.optimizer import adamw
from trainrun.settings import ModelSettings, OptimizerSettings


def gpt(**settings: object) -> GPT:
    torch.manual_seed(0)
    return GPT(ModelSettings(**{"layers": 2, "width": 32, "heads": 4, **settings}), vocabulary=50, context=16)


def shaken() -> GPT:
    """A model whose every weight matters: as made, its blocks do nothing."""
    model = gpt()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def test_no_token_sees_those_after_it() -> None:
    model, tokens = shaken(), torch.randint(50, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.allclose(before[0, 9:], after[0, 9:])


def test_attention_knows_the_order_of_tokens() -> None:
    model, tokens = shaken(), torch.randint(50, (1, 16))
    swapped = tokens[:, [1, 0, *range(2, 16)]]
    assert not torch.allclose(model(tokens)[0, -1], model(swapped)[0, -1], atol=1e-4)


def test_rotary_positions_are_relative() -> None:
    """With one layer and the same neighbourhood, what is said does not depend on where it is said."""
    torch.manual_seed(0)
    model = GPT(ModelSettings(layers=1, width=32, heads=4), vocabulary=50, context=64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    attention = model.blocks[0].attention
    x = torch.randn(1, 8, 32)
    early = attention(x, (model.cosine[:8], model.sine[:8]))
    late = attention(x, (model.cosine[40:48], model.sine[40:48]))
    torch.testing.assert_close(early, late, atol=1e-5, rtol=1e-4)


def test_loss_is_the_sum_over_valid_tokens() -> None:
    model, rows = shaken(), torch.randint(50, (3, 17))
    targets = rows[:, 1:].clone()
    expected = torch.nn.functional.cross_entropy(model(rows[:, :-1])[:, :5].flatten(0, 1), targets[:, :5].flatten()) * 15
    targets[:, 5:] = IGNORED
    torch.testing.assert_close(model.loss(Batch(rows[:, :-1], targets)), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_it_starts_at_chance_and_learns(tied: bool) -> None:
    model = gpt(tied=tied)
    optimizer = adamw(model, OptimizerSettings(learning_rate=1e-2))
    rows = torch.arange(17).repeat(4, 1) + torch.arange(4)[:, None]
    batch = Batch(rows[:, :-1], rows[:, 1:])
    first = model.loss(batch).item() / 64
    assert abs(first - math.log(50)) < 1.5
    for _ in range(60):
        loss = model.loss(batch) / 64
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1
    assert model.generate([0, 1, 2, 3], 30, temperature=0)[:8] == list(range(4, 12))


def test_generation_is_the_same_for_the_same_seed() -> None:
    model = shaken()
    assert model.generate([1], 40, seed=1) == model.generate([1], 40, seed=1)
    assert model.generate([1], 40, seed=1) != model.generate([1], 40, seed=2)
    assert len(model.generate([1] * 30, 40)) == 40


def test_grouped_queries_share_keys_and_values() -> None:
    """The same as full heads whose keys and values are repeated."""
    grouped, full = gpt(kv_heads=2), gpt()
    with torch.no_grad():
        for parameter in grouped.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
        for name, parameter in full.named_parameters():
            given = dict(grouped.named_parameters())[name]
            if name.endswith(("keys.weight", "values.weight")):
                given = given.view(2, 1, 8, 32).expand(2, 2, 8, 32).reshape(32, 32)
            parameter.copy_(given)
    tokens = torch.randint(50, (2, 16))
    torch.testing.assert_close(grouped(tokens), full(tokens), atol=1e-5, rtol=1e-4)


def test_weights_follow_from_the_seed_and_the_name_alone() -> None:
    settings = ModelSettings(layers=2, width=32, heads=4, norm_weights=True, tied=False, activation="swiglu")
    torch.manual_seed(3)
    torch.randn(100)  # how much was drawn before does not matter
    eager = GPT(settings, vocabulary=50, context=16)
    torch.manual_seed(3)
    with torch.device("meta"):
        made = GPT(settings, vocabulary=50, context=16)
    torch.manual_seed(9)
    for name, tensor in (*eager.named_parameters(), *eager.named_buffers()):
        assert torch.equal(made.initial(name), tensor), name
    deeper = GPT(ModelSettings(**{**settings.__dict__, "layers": 3}), vocabulary=50, context=16)
    assert not torch.equal(deeper.embedding.weight, eager.embedding.weight)
    assert deeper.initial("blocks.2.attention.keys.weight").std().item() == pytest.approx(32**-0.5, rel=0.1)
