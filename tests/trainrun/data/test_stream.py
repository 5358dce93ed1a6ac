"""The stream: shares of ranks, resume in the middle of an epoch, large files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainrun.config import ConfigError
from trainrun.data import stream as streams
from trainrun.data.dataset import map_tokens
from trainrun.data.order import sequence_at
from trainrun.data.stream import TokenStream
from trainrun.ranks import Ranks


def stream(tokens: Any, *, rank: int = 0, world: int = 1, **changes: Any) -> TokenStream:
    options = {"fingerprint": "f", "batch_tokens": 8 * 4, "sequence_length": 4, "micro_batch": 3, "seed": 0, **changes}
    ranks = Ranks(rank, world, rank, torch.device("cpu"), None, None)
    return TokenStream(tokens, vocabulary=1000, ranks=ranks, **options)


def read(data: TokenStream, steps: int) -> list[list[int]]:
    """The first token of each sequence of each step: token n stands at place n, so it tells which sequence it is."""
    found = []
    for _ in range(steps):
        found.append([int(row[0]) for batch in data.micro_batches() for row in batch.inputs])
        data.advance()
    return found


TOKENS = np.arange(4 * 27 + 1, dtype=np.uint16)  # 27 sequences: a step of 8 does not divide an epoch


def test_targets_are_the_tokens_after() -> None:
    for batch in stream(TOKENS).micro_batches():
        assert torch.equal(batch.targets, batch.inputs + 1)
        assert batch.inputs.dtype == torch.int64


def test_data_09_epochs_run_into_each_other_and_lose_nothing() -> None:
    steps = read(stream(TOKENS), 27)
    everything = [token for step in steps for token in step]
    assert {len(step) for step in steps} == {8}
    for epoch in range(8):
        assert sorted(everything[27 * epoch : 27 * (epoch + 1)]) == list(range(0, 108, 4))


@pytest.mark.parametrize("stop", [1, 5, 11])
def test_data_02_resume_in_the_middle_of_a_later_epoch(stop: int) -> None:
    whole = read(stream(TOKENS), 20)
    first = stream(TOKENS)
    read(first, stop)
    state = first.state()
    resumed = stream(TOKENS)
    resumed.load_state(state)
    assert read(resumed, 20 - stop) == whole[stop:]


def test_data_04_what_was_given_out_but_not_trained_on_comes_again() -> None:
    data = stream(TOKENS)
    next(data.micro_batches())
    assert data.state()["position"] == 0
    assert not data.complete
    resumed = stream(TOKENS)
    resumed.load_state(data.state())
    assert read(resumed, 1) == read(stream(TOKENS), 1)


def test_any_world_reads_the_same_sequences_in_each_step() -> None:
    alone = read(stream(TOKENS), 5)
    for world in (2, 4, 8):
        parts = [read(stream(TOKENS, rank=rank, world=world), 5) for rank in range(world)]
        assert [[token for part in parts for token in part[step]] for step in range(5)] == alone


@pytest.mark.parametrize("at_once", [1, 5, 16, 1000])
def test_that_places_are_found_for_many_steps_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(streams, "PLACES_AT_ONCE", at_once)
    data = stream(TOKENS, rank=1, world=2)
    for position in (0, 8, 16, 24, 8, 80, 83, 0):  # on and on, back, far ahead, and beside the steps so far
        data.load_state({**data.state(), "position": position})
        expected = sequence_at(np.arange(position + 4, position + 8, dtype=np.uint64), count=27, seed=0) * 4
        assert read(data, 1) == [expected.tolist()]


def test_another_dataset_length_or_seed_cannot_be_resumed() -> None:
    state = stream(TOKENS).state()
    for change in ({"fingerprint": "g"}, {"seed": 1}, {"sequence_length": 8}):
        with pytest.raises(ConfigError, match="the order of the data would not go on"):
            stream(TOKENS, **change).load_state(state)


def test_a_dataset_shorter_than_a_sequence_is_an_error() -> None:
    with pytest.raises(ConfigError, match="has 4 tokens, a sequence needs 5"):
        stream(TOKENS[:4])


def test_data_07_the_last_sequence_of_a_large_file_is_read(tmp_path: Path) -> None:
    length, count = 2**20, 3100  # 6.5 GB of two-byte tokens, of which only the last few are there
    path = tmp_path / "sparse.bin"
    total = length * count + 1
    with path.open("wb") as file:
        file.truncate(2 * total)
        file.seek(2 * (total - 5))
        file.write(np.array([11, 12, 13, 14, 15], dtype="<u2").tobytes())
    tokens = map_tokens(path, dtype="uint16", count=total)
    data = stream(tokens, sequence_length=length, batch_tokens=length, micro_batch=1)
    assert data.sequences == count
    order = sequence_at(np.arange(count, dtype=np.uint64), count=count, seed=0)
    data.load_state({**data.state(), "position": int(np.flatnonzero(order == count - 1)[0])})
    batch = next(data.micro_batches())
    assert batch.inputs[0, -4:].tolist() == [11, 12, 13, 14]
    assert batch.targets[0, -4:].tolist() == [12, 13, 14, 15]


def test_a_file_that_its_dataset_names_and_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.bin is missing"):
        map_tokens(tmp_path / "train.bin", dtype="uint16", count=3)
