"""Ranks meet and agree; the loop is the same for any number of them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from trainrun.data.dataset import TRAIN, open_dataset
from trainrun.data.order import sequence_at
from trainrun.models.gpt import GPT
from trainrun.settings import ModelSettings


def losses(outcome: Any) -> list[float]:
    lines = [json.loads(line) for path in sorted(outcome.folder.glob("state/metrics/*")) for line in path.open()]
    return [line["loss"] for line in lines if "loss" in line]


def plain_loop(dataset: str, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same training as a page of PyTorch that knows nothing of trainrun's loop."""
    tokens = open_dataset(dataset).tokens(TRAIN)
    torch.manual_seed(0)
    gpt = GPT(ModelSettings(layers=1, width=16, heads=2), vocabulary=257, context=16)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    count = (len(tokens) - 1) // 16
    found = []
    for step in range(1, steps + 1):
        starts = sequence_at(np.arange(8 * (step - 1), 8 * step, dtype=np.uint64), count=count, seed=0).astype(int) * 16
        rows = torch.tensor(np.stack([tokens[start : start + 17] for start in starts]).astype(np.int64))
        logits = gpt(rows[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 257), rows[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        decay = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * (step - 3) / (steps - 3)))
        optimizer.param_groups[0]["lr"] = 3e-3 * (step / 3 if step <= 3 else decay)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, {name: p.detach().numpy() for name, p in gpt.named_parameters()}


@pytest.mark.parametrize(("world", "micro_batch"), [(1, 8), (1, 3), (2, 4), (2, 1), (4, 2)])
def test_any_number_of_ranks_and_micro_batches_trains_like_a_plain_loop(
    ranks: Any, tiny: list[str], dataset: str, world: int, micro_batch: int
) -> None:
    expected, parameters = plain_loop(dataset, 10)
    arguments = [*tiny, f"--data={dataset}", "--steps=10", f"--micro_batch={micro_batch}"]
    outcomes = ranks("train", world=world, arguments=arguments)
    assert [outcome.code for outcome in outcomes] == [0] * world, outcomes[0].log
    np.testing.assert_allclose(losses(outcomes[0]), expected, rtol=2e-5)
    assert expected[-1] < expected[0] - 0.1
    for outcome in outcomes:
        for name, value in outcome.parameters().items():
            # AdamW divides by the root of the second moment, which magnifies rounding where gradients are near zero.
            np.testing.assert_allclose(value, parameters[name], atol=2e-4, err_msg=name)
    assert len({outcome.result["final"] for outcome in outcomes}) == 1


def test_num_02_ela_10_order_batch_and_learning_rate_do_not_depend_on_the_ranks(
    ranks: Any, tiny: list[str], dataset: str
) -> None:
    arguments = [*tiny, f"--data={dataset}", "--steps=6"]
    rates, orders = [], []
    for world, micro_batch in ((1, 2), (2, 4), (4, 2)):
        outcomes = ranks("train", world=world, arguments=[*arguments, f"--micro_batch={micro_batch}"])
        rates.append([outcome.result["rates"] for outcome in outcomes])
        by_step: dict[int, list[list[int]]] = {}
        for outcome in outcomes:  # ranks take consecutive shares of each step's sequences
            for step, sequences in outcome.result["seen"]:
                by_step.setdefault(step, []).extend(sequences)
        orders.append(by_step)
    assert all(rate == rates[0][0] for world in rates for rate in world)
    assert rates[0][0][:3] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert orders[0] == orders[1] == orders[2]
    assert {len(sequences) for sequences in orders[0].values()} == {8}


def test_ela_10_a_batch_that_does_not_divide_is_an_error_with_the_numbers(ranks: Any, tiny: list[str], dataset: str) -> None:
    outcomes = ranks("train", world=3, arguments=[*tiny, f"--data={dataset}", "--steps=2"])
    for outcome in outcomes:
        assert outcome.code == 1
        assert (
            "128 tokens is 8 sequences of 16, which do not divide among 3 ranks. Allowed numbers of ranks: 1, 2, 4, 8"
            in outcome.log
        )
        assert "batch_tokens to 144" in outcome.log


def test_bf16_trains_close_to_fp32(ranks: Any, tiny: list[str], dataset: str) -> None:
    arguments = [*tiny, f"--data={dataset}", "--steps=10", "--precision=bf16"]
    outcomes = ranks("train", world=2, arguments=arguments)
    expected, _ = plain_loop(dataset, 10)
    found = losses(outcomes[0])
    np.testing.assert_allclose(found, expected, rtol=0.02)
    assert found != pytest.approx(expected, rel=1e-6)


def test_ranks_gather_and_broadcast_json_of_any_size(ranks: Any) -> None:
    outcomes = ranks("collect", world=3, value="é")
    for outcome in outcomes:
        assert outcome.result["gathered"] == [{"rank": n, "value": "é" * (n + 1)} for n in range(3)]
        assert outcome.result["from_first"] == {"rank": 0, "value": "é"}


@pytest.mark.parametrize("steps_before_stop", [1, 4])
def test_a_signal_to_one_rank_stops_all_at_the_same_step_and_the_run_goes_on_as_if_nothing_had_been(
    ranks: Any, tiny: list[str], dataset: str, tmp_path: Any, steps_before_stop: int
) -> None:
    arguments = [*tiny, f"--data={dataset}", "--steps=6", "--checkpoint.every_steps=100"]
    uninterrupted = ranks("train", world=2, arguments=arguments, dropout=True)
    arguments.append(f"--checkpoint.location={tmp_path / 'runs'}")
    stopped = ranks("train", world=2, arguments=arguments, dropout=True, terminate=(1, steps_before_stop))
    assert [outcome.code for outcome in stopped] == [75, 75]
    assert f"Asked to stop through another rank: ended at step {steps_before_stop} of 6." in stopped[0].log
    resumed = ranks("train", world=2, arguments=arguments, dropout=True)
    assert [outcome.result["resumed"] for outcome in resumed] == [steps_before_stop] * 2
    assert [outcome.result["final"] for outcome in resumed] == [outcome.result["final"] for outcome in uninterrupted]


@pytest.mark.parametrize(("step", "codes"), [(1, [0, 0]), (3, [1, 1])])
def test_a_silent_peer_is_waited_for_at_the_first_step_and_given_up_later(
    ranks: Any, tiny: list[str], dataset: str, step: int, codes: list[int]
) -> None:
    arguments = [*tiny, f"--data={dataset}", "--steps=4", "--collective_timeout_seconds=1"]
    outcomes = ranks("train", world=2, arguments=arguments, only={1: {"pause": (step, 3.0)}})
    assert [outcome.code for outcome in outcomes] == codes, outcomes[0].log
