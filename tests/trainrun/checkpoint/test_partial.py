"""Weights of another run's checkpoint: all of them or some, by other names, for any model that has a place for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bundled_loop import train

from trainrun.checkpoint.layout import commit_key, committed_steps
from trainrun.checkpoint.state import TrainState
from trainrun.checkpoint.tensors import model_tensors
from trainrun.config import ConfigError
from trainrun.errors import CheckpointError
from trainrun.models.gpt import GPT
from trainrun.optimizer import adamw
from trainrun.ranks import leave
from trainrun.run import Run
from trainrun.store import Store, open_store

Start = Callable[..., Run]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("base")


@pytest.fixture
def trained(base: Path, alone: Start, dataset: str) -> Store:
    """The folder of a run "base" with checkpoints of steps 1 and 2; made once."""
    store = open_store(str(base)).child("base")
    if not committed_steps(store):
        run = alone("--run=base", f"--data={dataset}", "--steps=2", "--checkpoint.every_steps=1", f"--checkpoint.location={base}")
        train(run)
    return store


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """fsdp2 and DeepSpeed make a process group of one."""
    yield
    leave()


def fresh(alone: Start, dataset: str, *more: str) -> tuple[TrainState, GPT, Run]:
    """A run that has not begun, and its model."""
    run = alone(f"--data={dataset}", "--seed=7", "--steps=2", *more)
    data = run.tokens()
    gpt = GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    model, optimizer = run.prepare(gpt, adamw(gpt, run.settings.optimizer))
    return run.state(model=model, optimizer=optimizer, data=data), gpt, run


def weights_of(gpt: GPT) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model_tensors(gpt).items()}


def saved(store: Store, step: int) -> dict[str, torch.Tensor]:
    from trainrun.checkpoint.layout import read_commit
    from trainrun.checkpoint.read import read_tensors

    return read_tensors(store, read_commit(store, step), lambda name: name.startswith("model/"))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in one if name in other and torch.equal(one[name], other[name])}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1"])
def test_a_run_starts_from_the_newest_weights_of_another_and_its_own_checkpoints_win(
    trained: Store, alone: Start, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    arguments = (
        *(f"--data={dataset}", "--steps=1", f"--strategy={strategy}", "--seed=7"),
        *(f"--weights.checkpoint={trained.url}", f"--checkpoint.location={tmp_path}"),
    )
    reached: list[Any] = []

    def begin() -> TrainState:
        run = alone(*arguments)
        data = run.tokens()
        with torch.device("meta"):
            gpt = GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
        model, optimizer = run.prepare(gpt, adamw(gpt, run.settings.optimizer))
        state = run.state(model=model, optimizer=optimizer, data=data)
        reached.append(state.resume())
        if not run.completed:
            parts = {part.name: part.local.clone() for part in model.strategy.model_parts() if part.local.shape == part.shape}
            assert same(parts, saved(trained, 2)) == set(parts)
        for _ in run.steps():
            for batch in data.micro_batches():
                run.backward(model.loss(batch))
            run.step(optimizer)
            state.save(now=True)
        return state

    begin()
    assert "Weights were loaded from" in capsys.readouterr().err
    begin()
    assert "Weights were loaded from" not in capsys.readouterr().err
    assert reached == [0, 1]


def test_some_weights_by_pattern_of_an_older_step_under_other_names(trained: Store, alone: Start, dataset: str) -> None:
    state, gpt, run = fresh(alone, dataset, "--model.layers=2")
    assert state.resume() == 0
    before = weights_of(gpt)
    loaded = state.load(f"{trained.url}/step-000000001", select=["blocks.*"], rename={"blocks.0.": "blocks.1."})
    there, now = saved(trained, 1), weights_of(gpt)
    assert loaded.step == 1
    assert loaded.sources
    assert {name for name in now if not torch.equal(now[name], before[name])} <= set(loaded.sources)
    assert all(new.startswith("model/blocks.1.") for new in loaded.sources)
    assert all(torch.equal(now[new], there[old]) for new, old in loaded.sources.items())
    assert set(loaded.missing) == {n.removeprefix("model/") for n in now.keys() - loaded.sources.keys()}
    assert (run.completed, run.tokens_done) == (0, 0)


@pytest.mark.parametrize(
    ("more", "options", "told"),
    [
        ((), {"select": ["block.*"]}, r"weights\.select has 'block\.\*', which no tensor .* fits\. Near block\.\*: .*blocks\.0"),
        ((), {"rename": {"x.": "y."}}, r"weights\.rename has 'x\.', with which no selected tensor"),
        ((), {"rename": {"blocks.0.": "blocks.4."}}, r"has what this model lacks: blocks\.0\..*Near blocks\.4\..*: blocks\.0\."),
        (("--model.layers=2",), {}, r"lacks what this model has: blocks\.1\..*Near blocks\.1.*blocks\.0\..*weights\.strict"),
        (
            ("--model.width=32",),
            {"strict": False},
            r"embedding\.weight is float32 \[257, 16\] in the checkpoint of step 2, .* 32\]",
        ),
        (("--model.heads=4",), {}, r"(?s)model\.heads was 2 .*weights\.strict to false"),
        ((), {"rename": {"blocks.": "x.", "embedding.weight": "x."}, "strict": False}, "has no tensor of this model's"),
    ],
)
def test_names_and_shapes_that_do_not_fit_are_told(
    trained: Store, alone: Start, dataset: str, more: tuple[str, ...], options: dict[str, Any], told: str
) -> None:
    state, gpt, _ = fresh(alone, dataset, *more)
    before = weights_of(gpt)
    with pytest.raises(ConfigError, match=told):
        state.load(trained.url, **options)
    assert same(before, weights_of(gpt)) == set(before)


def test_what_is_missing_or_left_over_is_returned_where_that_is_allowed(trained: Store, alone: Start, dataset: str) -> None:
    state, _, _ = fresh(alone, dataset, "--model.layers=2")
    loaded = state.load(trained.url, rename={"embedding.": "other."}, strict=False)
    assert loaded.unexpected == ("embedding.weight",)
    assert "embedding.weight" in loaded.missing
    assert any(name.startswith("blocks.1.") for name in loaded.missing)


def test_of_a_damaged_checkpoint_the_one_before_is_taken_and_nothing_is_renamed(
    alone: Start, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = alone(f"--data={dataset}", "--steps=2", "--checkpoint.every_steps=1", f"--checkpoint.location={tmp_path}")
    train(run)
    store = open_store(str(tmp_path / "run"))
    store.put(commit_key(2), b"rubbish")
    state, _, _ = fresh(alone, dataset)
    assert state.load(store.url).step == 1
    assert "WARNING: the checkpoint of step 2" in capsys.readouterr().err
    assert store.get(commit_key(2)) == b"rubbish"
    with pytest.raises(CheckpointError, match=r"No checkpoint at .* could be read for its weights: .*is not JSON"):
        state.load(f"{store.url}/step-000000002")
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5 at .*There are: \[1, 2\]"):
        state.load(f"{store.url}/step-000000005")
    with pytest.raises(CheckpointError, match=r"no checkpoint at .* to take weights from"):
        state.load(str(tmp_path / "nowhere"))


def test_settings_of_weights_without_a_checkpoint_are_refused(alone: Start) -> None:
    with pytest.raises(ConfigError, match=r"weights\.strict is set, but weights\.checkpoint, of which it speaks, is not"):
        alone("--weights.strict=false")
    with pytest.raises(ConfigError, match=r"weights\.select is empty"):
        alone("--weights.checkpoint=x", "--weights.select=[]")
