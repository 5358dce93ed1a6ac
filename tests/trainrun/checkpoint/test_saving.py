"""Saving: policy, retention, and what tensors are called."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import writer_faults
from torch import nn

from trainrun.checkpoint import process
from trainrun.checkpoint.layout import Commit, committed_steps, new_attempt, read_commit
from trainrun.checkpoint.parts import Part, whole
from trainrun.checkpoint.random_streams import load_random_state, random_state
from trainrun.checkpoint.snapshot import take_snapshot
from trainrun.checkpoint.tensors import Arrangement, canonical, model_tensors, optimizer_parts
from trainrun.checkpoint.write import write_commit, write_shard
from trainrun.config import ConfigError
from trainrun.errors import CheckpointError
from trainrun.ranks import Ranks
from trainrun.run import Run
from trainrun.store import Store, open_store
from trainrun.strategies.ddp import DDP


def write_checkpoint(store: Store, step: int) -> Commit:
    """A small checkpoint, as one rank writes it."""
    attempt = new_attempt()
    snapshot = take_snapshot([whole("model/w", torch.full((3,), float(step)))], {})
    shard = write_shard(store, snapshot, step=step, attempt=attempt, rank=0, timeout_seconds=10)
    commit = Commit(
        run="run", step=step, tokens=0, attempt=attempt, time=0.0, world=1, mesh={}, data={}, settings={}, versions={},
        shards=(shard,),
    )  # fmt: skip
    assert write_commit(store, commit)
    return commit


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"))


def test_the_first_commit_of_a_step_stays(store: Store) -> None:
    first = write_checkpoint(store, 5)
    other = Commit(**{**first.__dict__, "attempt": "another"})
    assert not write_commit(store, other)
    assert write_commit(store, first)  # its own, as after an answer that was lost
    assert replace(read_commit(store, 5), sha256="") == first


def a_loop(run: Run, model: nn.Module) -> tuple[Any, Callable[[], None]]:
    """State and a function that does one step on the stream of ``run``."""
    data = run.tokens()
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = run.state(model=prepared, optimizer=optimizer, data=data)
    state.resume()

    def step() -> None:
        for batch in data.micro_batches():
            run.backward(prepared(batch.inputs).sum())
        run.step(optimizer)

    return state, step


class Embedded(nn.Module):
    """The smallest model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(257))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight[tokens]


def test_ckpt_04_a_failed_save_is_tried_again_at_the_next_interval(
    alone: Callable[..., Run], dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = alone(f"--data={dataset}", "--steps=10", "--checkpoint.every_steps=2", f"--checkpoint.location={tmp_path}")
    state, step = a_loop(run, Embedded())
    full = tmp_path / "full"
    monkeypatch.setattr(process, "PROGRAM", writer_faults.program(f"no_space_while({str(full)!r})"))
    saved = {}
    for broken in (True, True, True, True, False, False):
        state.wait()
        full.touch() if broken else full.unlink(missing_ok=True)
        step()
        saved[run.completed] = state.save()
    assert saved == {1: False, 2: True, 3: False, 4: True, 5: False, 6: True}
    assert run.saved_step is None
    state.wait()
    assert run.saved_step == 6
    told = capsys.readouterr().err
    first = r"saving step 2 failed \(1 of 3 in a row\): rank 0: Could not write .*rank-00000.bin: .*No space left on device"
    assert re.search(first, told)
    assert "saving step 4 failed (2 of 3 in a row)" in told
    assert committed_steps(open_store(str(tmp_path / "run"))) == [6]
    full.touch()
    step()
    with pytest.raises(CheckpointError, match=r"3 saves in a row failed, the last at step 7: rank 0: Could not write .*No space"):
        state.save(now=True)
    state.close()


def test_parts_that_do_not_make_up_a_whole_are_never_committed(
    alone: Callable[..., Run], dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a strategy with an error in it would give them."""
    run = alone(f"--data={dataset}", "--steps=10", "--checkpoint.every_steps=1", f"--checkpoint.location={tmp_path}")
    state, step = a_loop(run, Embedded())
    monkeypatch.setattr(DDP, "model_parts", lambda self: [Part("model/weight", self.module.weight.detach()[:200], (257,), (0,))])
    step()
    state.save()
    state.wait()
    state.close()
    told = capsys.readouterr().err
    assert "saving step 1 failed (1 of 3 in a row): rank 0: what the ranks wrote is no checkpoint: the slices of the" in told
    assert committed_steps(open_store(str(tmp_path / "run"))) == []


def test_a_diverged_run_is_not_saved(alone: Callable[..., Run], dataset: str, tmp_path: Path) -> None:
    run = alone(f"--data={dataset}", "--steps=10", "--log_every=100", f"--checkpoint.location={tmp_path}")
    model = Embedded()
    state, step = a_loop(run, model)
    with torch.no_grad():
        model.weight.fill_(float("inf"))
    model.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    step()
    with pytest.raises(FloatingPointError, match="The gradient norm at step 1 is nan"):
        state.save(now=True)
    assert committed_steps(open_store(str(tmp_path / "run"))) == []


def test_names_are_those_of_the_model_without_wrappers() -> None:
    assert canonical("module._orig_mod.layers.0._checkpoint_wrapped_module.weight") == "layers.0.weight"

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4, 3)
            self.head = nn.Linear(3, 4, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("kept", torch.ones(2))
            self.register_buffer("not_kept", torch.ones(2), persistent=False)

    assert sorted(model_tensors(Tied())) == ["model/embedding.weight", "model/kept"]


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = Embedded(), Embedded()
    optimizer = torch.optim.Adam(other.parameters())
    other.weight.grad = torch.ones(257)
    optimizer.step()
    with pytest.raises(ConfigError, match=r"a parameter of shape \(257,\) that the model has not"):
        optimizer_parts(optimizer, model, Arrangement(Ranks(0, 1, 0, torch.device("cpu"), None, None), None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8])
def test_tensors_of_any_type_and_layout_come_back_bit_for_bit(store: Store, dtype: torch.dtype) -> None:
    from trainrun.checkpoint.read import read_tensors

    square = (torch.randn(6, 6) * 3).to(dtype)
    tensors = {"whole": square, "turned": square.t(), "part": square[1:5, ::2], "scalar": square[0, 0], "empty": square[:0]}
    snapshot = take_snapshot([whole(name, tensor) for name, tensor in tensors.items()], {"v": [1, None]})
    shard = write_shard(store, snapshot, step=1, attempt="a", rank=0, timeout_seconds=10)
    commit = Commit(
        run="run", step=1, tokens=0, attempt="a", time=0.0, world=1, mesh={}, data={}, settings={}, versions={}, shards=(shard,)
    )
    found = read_tensors(store, commit, lambda name: True)
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor), name


def test_a_snapshot_does_not_change_with_its_tensors() -> None:
    tensor = torch.ones(4)
    snapshot = take_snapshot([whole("t", tensor)], {})
    before = bytes(snapshot.data)
    tensor.zero_()
    assert bytes(snapshot.data) == before


def test_random_streams_come_back() -> None:
    import random

    tensors, values = random_state(0, torch.device("cpu"))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}

    def draw() -> tuple[Any, ...]:
        return random.random(), random.gauss(0, 1), float(np.random.rand()), torch.rand(3).tolist()

    first = draw()
    draw()
    load_random_state(0, torch.device("cpu"), tensors, values)
    assert draw() == first
