"""The strategy "auto": which it takes, why, and what it says when nothing fits."""

import dataclasses
import json
import types

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from trainrun import devices
from trainrun.config import ConfigError, to_mapping
from trainrun.models.gpt import GPT
from trainrun.optimizer import adamw
from trainrun.ranks import Ranks
from trainrun.settings import ModelSettings, TrainSettings
from trainrun.settings.layers import train_settings
from trainrun.strategies.auto import Machine, choose
from trainrun.strategies.facts import describe, hidden_size_of, shape_of_model
from trainrun.strategies.host_memory import require_host_memory

A100 = 40 * 2**30
H100 = 80 * 2**30


def llama(name="llama3-8b", *, context=4096, **given):
    settings = train_settings(
        {"model": {"preset": name}, "precision": "bf16", "sequence_length": context, **given}, source="the test"
    )
    with torch.device("meta"):
        model = GPT(settings.model, vocabulary=128, context=context)
    return settings, describe(model)


BATCH = {"batch_tokens": 4096 * 64, "micro_batch": 1}


def test_a_model_on_the_meta_device_is_described_by_its_sizes():
    _, model = llama(**BATCH)
    assert model.parameters == 8_030_261_248
    assert model.largest_unit == 218_112_000
    assert model.outside == 2 * 128_256 * 4096 + 4096
    assert model.shape.kv_width == 1024


def test_ddp_where_it_fits():
    settings, model = llama("llama3.2-1b", **BATCH)
    choice = choose(settings, model, Machine(memory=H100, ranks=16, local_ranks=8))
    assert choice.settings.strategy == "ddp"
    assert choice.reason.startswith("Strategy ddp: it takes about ")
    assert "1,235,814,400 parameters" in choice.reason


def test_8b_on_two_machines_is_sharded_within_each():
    settings, model = llama(**BATCH)
    choice = choose(settings, model, Machine(memory=H100, ranks=16, local_ranks=8))
    assert (choice.settings.strategy, choice.settings.sharding.shard_size) == ("fsdp2", 8)
    assert "fsdp2 over 8 ranks" in choice.reason
    assert "ddp (" in choice.reason and "would not fit" in choice.reason


def test_70b_is_sharded_over_all():
    settings, model = llama("llama2-70b", activation_checkpointing="full", **BATCH)
    choice = choose(settings, model, Machine(memory=H100, ranks=64, local_ranks=8))
    assert (choice.settings.strategy, choice.settings.sharding.shard_size) == ("fsdp2", 0)


def test_nothing_fits_names_the_numbers_and_what_helps():
    settings, model = llama("llama2-70b", batch_tokens=4096 * 64, micro_batch=2)
    with pytest.raises(ConfigError) as caught:
        choose(settings, model, Machine(memory=A100, ranks=8, local_ranks=8))
    message = str(caught.value)
    for part in (
        "68,976,648,192 parameters",
        "ddp (",
        "fsdp2 over 8 ranks (",
        "42.9 GB",
        "smaller micro_batch",
    ):
        assert part in message
    assert 'activation_checkpointing "full"' in message
    assert 'offload_parameters "cpu" (slower)' in message, "offered, never taken"


def test_what_is_said_to_help_does():
    settings, model = llama("llama2-70b", activation_checkpointing="full", batch_tokens=4096 * 512, micro_batch=1)
    with pytest.raises(ConfigError) as caught:
        choose(settings, model, Machine(memory=A100, ranks=8, local_ranks=8))
    ranks = int(str(caught.value).split("What helps: ")[1].split(" ")[0])
    assert choose(settings, model, Machine(memory=A100, ranks=ranks, local_ranks=8)).settings.strategy == "fsdp2"
    with pytest.raises(ConfigError):
        choose(settings, model, Machine(memory=A100, ranks=ranks // 2, local_ranks=8))


def test_offload_that_is_asked_for_is_kept_and_goes_to_fsdp2():
    settings, model = llama(sharding={"offload_optimizer": "cpu", "offload_parameters": "cpu"}, **BATCH)
    choice = choose(settings, model, Machine(memory=H100, ranks=1, local_ranks=1))
    assert (choice.settings.strategy, choice.settings.sharding.offload_parameters) == ("fsdp2", "cpu")


def test_a_shard_size_that_is_set_is_kept():
    settings, model = llama(sharding={"shard_size": 4}, activation_checkpointing="full", **BATCH)
    choice = choose(settings, model, Machine(memory=H100, ranks=16, local_ranks=8))
    assert choice.settings.sharding.shard_size == 4


@hypothesis_settings(max_examples=200, deadline=None)
@given(
    memory=st.integers(10**6, 10**12),
    nodes=st.integers(1, 64),
    local=st.sampled_from([1, 4, 8]),
    more=st.integers(1, 8),
    micro_batch=st.sampled_from([1, 4, "auto"]),
    checkpointing=st.sampled_from(["none", "selective", "full"]),
)
def test_more_memory_never_takes_a_strategy_that_communicates_more(memory, nodes, local, more, micro_batch, checkpointing):
    order = {("ddp", 0): 0, ("fsdp2", local): 1, ("fsdp2", 0): 2}
    given_settings = TrainSettings(micro_batch=micro_batch, activation_checkpointing=checkpointing, precision="bf16")

    def rank(bytes_of_memory):
        try:
            chosen = choose(
                given_settings, MODEL, Machine(memory=bytes_of_memory, ranks=nodes * local, local_ranks=local)
            ).settings
        except ConfigError:
            return 3
        assert chosen.sharding.offload_optimizer == chosen.sharding.offload_parameters == "none"
        return order[chosen.strategy, chosen.sharding.shard_size]

    assert rank(memory * more) <= rank(memory)


MODEL = llama("llama3.2-3b", **BATCH)[1]


def test_a_model_of_unknown_shape_is_judged_by_its_states_and_the_reason_says_so():
    model = describe(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
    assert model.shape is None
    choice = choose(TrainSettings(), model, Machine(memory=10**9, ranks=2, local_ranks=2))
    assert "what it computes, which is not known, comes on top" in choice.reason


def test_models_of_transformers_tell_their_shape_and_hidden_size():
    configuration = {"model_type": "gpt2", "n_embd": 24, "n_layer": 2, "n_positions": 8, "vocab_size": 30}
    model = torch.nn.Linear(2, 2)
    model.config = types.SimpleNamespace(to_dict=lambda: configuration)
    assert (shape_of_model(model).width, hidden_size_of(model)) == (24, 24)
    model.config = types.SimpleNamespace(to_dict=lambda: {"model_type": "new", "text_config": {"hidden_size": 40}})
    assert (shape_of_model(model), hidden_size_of(model)) == (None, 40)
    assert hidden_size_of(torch.nn.Linear(2, 2)) is None
    assert hidden_size_of(GPT(ModelSettings(width=16, heads=2, layers=1), vocabulary=9, context=4)) == 16


def test_a_run_shows_what_was_chosen_in_its_settings_and_events(alone, dataset, tmp_path, capsys):
    run = alone(f"--data={dataset}")
    assert run.settings.strategy == "auto"
    data = run.tokens()
    gpt = GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    run.prepare(gpt, adamw(gpt, run.settings.optimizer))
    assert to_mapping(run.settings)["strategy"] == "ddp"
    assert "Strategy ddp: it takes about" in capsys.readouterr().err
    lines = [json.loads(line) for file in (tmp_path / "state" / "metrics").iterdir() for line in file.read_text().splitlines()]
    (event,) = [line for line in lines if line.get("event") == "strategy"]
    assert event["chosen"] == "ddp"
    assert event["reason"].startswith("Strategy ddp")


def test_all_ranks_choose_alike_by_the_one_that_has_least(ranks, dataset, tiny):
    """Rank 1 sees too little memory for a replica."""
    arguments = [*tiny, f"--data={dataset}", "--steps=1", "--model.width=128", "--model.layers=6"]
    outcomes = ranks("chosen", world=2, arguments=arguments, only={1: {"bytes_of_memory": 22_000_000}})
    assert [outcome.result for outcome in outcomes] == [{"strategy": "fsdp2"}] * 2, outcomes[0].log


def test_ux_05_offload_that_the_machine_cannot_hold_is_refused_before_anything_is_allocated(monkeypatch):
    settings, _ = llama(strategy="zero3", sharding={"offload_optimizer": "cpu", "offload_parameters": "cpu"}, **BATCH)
    with torch.device("meta"):
        model = GPT(settings.model, vocabulary=128, context=4096)
    group = Ranks(0, 16, 0, torch.device("cpu"), None, None, local_size=8)
    monkeypatch.setattr(devices, "memory", lambda device, *, local_size: devices.Memory(72 * 10**9, 0))
    with pytest.raises(ConfigError) as caught:
        require_host_memory(settings, group, model)
    assert "Offload needs 72.3 GB of this machine's memory for its 8 ranks" in str(caught.value)
    assert "which has 72 GB" in str(caught.value)
    require_host_memory(dataclasses.replace(settings, strategy="zero3"), dataclasses.replace(group, size=32), model)
