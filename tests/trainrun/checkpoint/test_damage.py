"""Checkpoints that are damaged, hostile or of something else are never used, and never passed over in silence."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bundled_loop import train

from trainrun.checkpoint.damage import find_damage
from trainrun.checkpoint.layout import Damaged, commit_key, committed_steps, parse_commit, read_commit
from trainrun.checkpoint.read import newest_good
from trainrun.checkpoint.tensors import model_tensors
from trainrun.checkpoint.write import write_commit
from trainrun.config import ConfigError
from trainrun.errors import CheckpointError
from trainrun.models.gpt import GPT
from trainrun.run import Run
from trainrun.store import Store, StoreError, open_store

Start = Callable[..., Run]


def run_to(alone: Start, dataset: str, folder: Path, steps: int, *more: str) -> tuple[Run, GPT]:
    """Train, or go on, in this process, with a checkpoint at every step."""
    run = alone(f"--data={dataset}", f"--steps={steps}", "--checkpoint.every_steps=1", f"--checkpoint.location={folder}", *more)
    return run, train(run)


@pytest.fixture
def store(alone: Start, dataset: str, tmp_path: Path) -> Store:
    """A run's folder with checkpoints of steps 1, 2 and 3."""
    run_to(alone, dataset, tmp_path, 3)
    return open_store(str(tmp_path / "run"))


def newest_shard(store: Store) -> Path:
    return Path(store.url, read_commit(store, 3).shards[0].key)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 6 // 10])


def sealed(document: dict[str, Any]) -> str:
    """The text of a COMMIT with the digest of its own content: a forgery, or the work of a writer with a fault."""
    content = {key: value for key, value in document.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest})


@pytest.mark.parametrize("damage", [flip_a_byte, truncate, Path.unlink], ids=lambda damage: damage.__name__)
def test_ckpt_04_a_damaged_shard_is_told_and_the_checkpoint_before_is_taken(
    store: Store,
    alone: Start,
    dataset: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
) -> None:
    damage(newest_shard(store))
    assert find_damage(store, read_commit(store, 3))
    run, _ = run_to(alone, dataset, tmp_path, 4)
    told = capsys.readouterr().err
    assert "WARNING: the checkpoint of step 3 is damaged: rank 0" in told
    assert "Resumed from step 2" in told
    assert run.completed == 4
    # Step 3 was trained again and committed again; the damaged one was set aside.
    assert committed_steps(store) == [2, 3, 4]
    assert not find_damage(store, read_commit(store, 3))
    assert any("step-000000003/DAMAGED-" in item.key for item in store.list())


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"\x80\x04\x95", b'{"step": 3}', pickle.dumps({"step": 3})],
    ids=lambda content: repr(content[:12]),
)
def test_ckpt_04_a_commit_that_is_none_is_damage(
    store: Store, alone: Start, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    store.put(commit_key(3), content)
    run_to(alone, dataset, tmp_path, 3)
    assert "step 3 is damaged" in capsys.readouterr().err


def test_ckpt_04_no_silent_start_over_damaged_checkpoints(store: Store, alone: Start, dataset: str, tmp_path: Path) -> None:
    for step in committed_steps(store):
        store.put(commit_key(step), b"garbage")
    with pytest.raises(CheckpointError, match=r"None of the 3 checkpoints .* can be read"):
        run_to(alone, dataset, tmp_path, 4)
    with pytest.raises(CheckpointError, match="damaged"):
        newest_good(store, lambda commit: None, warn=lambda text: None)
    assert committed_steps(store) == [1, 2, 3]


def test_a_store_that_fails_is_no_damage(
    store: Store, alone: Start, dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A passing fault must not cost the work since the checkpoint before."""

    def failing(*arguments: Any) -> None:
        raise StoreError("the network is down")

    monkeypatch.setattr("trainrun.checkpoint.read.load_into", failing)
    with pytest.raises(CheckpointError, match="step 3 could not be read: rank 0: the network is down"):
        run_to(alone, dataset, tmp_path, 4)
    assert committed_steps(store) == [1, 2, 3]


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_num_09_a_hostile_checkpoint_runs_no_code(store: Store, alone: Start, dataset: str, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    newest_shard(store).write_bytes(pickle.dumps(Bomb(trap)))
    store.put(commit_key(2), pickle.dumps(Bomb(trap)))
    run_to(alone, dataset, tmp_path, 3)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("shards", 0, "key"), "../../etc/passwd"),
        (("shards", 0, "key"), "/etc/passwd"),
        (("shards", 0, "key"), "step-000000002/x/rank-00000.bin"),
        (("shards", 0, "length"), 10),
        (("shards", 0, "tensors", "model/embedding.weight", 0, "offset"), -64),
        (("shards", 0, "tensors", "model/embedding.weight", 0, "length"), 10**15),
        (("shards", 0, "tensors", "model/embedding.weight", 0, "dtype"), "object"),
        (("shards", 0, "tensors", "model/embedding.weight", 0, "slice"), [[0, 10**9], [0, 16]]),
        (("shards", 0, "tensors", "model/embedding.weight", 0, "shape"), [1]),
        (("shards", 0, "tensors", "model/embedding.weight"), []),
        (("step",), 5),
        (("world",), 2),
        (("shards",), []),
        (("settings",), 3),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_commit_that_contradicts_itself_is_damage(store: Store, path: tuple[Any, ...], value: Any) -> None:
    document = json.loads(store.get(commit_key(3)))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(Damaged, match=r"contradicts itself|is not a COMMIT"):
        parse_commit(sealed(document), 3)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("data", "position"), 1),
        (("data", "position"), "x"),
        (("data",), {}),
        (("tokens",), -5),
        (("run",), "another"),
        (("time",), 0.5),
        (("sha256",), ""),
        (("shards", 0, "values"), {}),
        (("shards", 0, "tensors", "rng/0/torch"), None),
    ],
)
def test_ckpt_04_a_commit_of_which_anything_was_changed_is_damage(store: Store, path: tuple[Any, ...], value: Any) -> None:
    """Even where it still reads well: another position would train on other text without a word."""
    document = json.loads(store.get(commit_key(3)))
    place = document
    for name in path[:-1]:
        place = place[name]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    store.put(commit_key(3), json.dumps(document).encode())
    with pytest.raises(Damaged, match="is not what was written"):
        read_commit(store, 3)
    messages: list[str] = []
    assert newest_good(store, lambda commit: commit.step, warn=messages.append)[1] == 2
    assert "step 3 is damaged" in messages[0]


def test_a_commit_too_deep_to_read_is_damage() -> None:
    with pytest.raises(Damaged, match="is not JSON"):
        parse_commit("[" * 100_000, 3)


def test_a_commit_that_is_rubbish_is_no_commit_of_ours(store: Store) -> None:
    """The other ranks wait for the answer: it must not be an exception."""
    commit = read_commit(store, 3)
    store.put(commit_key(3), b"")
    assert not write_commit(store, commit)


def test_a_commit_of_a_newer_trainrun_says_so(store: Store) -> None:
    document = {**json.loads(store.get(commit_key(3))), "schema": 4, "novelty": True}
    with pytest.raises(Damaged, match="is not what was written"):  # a flipped bit makes no new version
        parse_commit(json.dumps(document), 3)
    with pytest.raises(CheckpointError, match="has schema 4, this trainrun reads 3"):
        parse_commit(sealed(document), 3)


def test_another_model_is_an_error_that_names_what_differs(store: Store, alone: Start, dataset: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks what this model has: model/blocks\.1\."):
        run_to(alone, dataset, tmp_path, 4, "--model.layers=2")
    with pytest.raises(
        ConfigError, match=r"model/embedding\.weight is float32 \[257, 16\] in the checkpoint, float32 \[257, 32\] here"
    ):
        run_to(alone, dataset, tmp_path, 4, "--model.width=32")
    with pytest.raises(ConfigError, match=r"lacks what this model has: model/head\.weight"):
        run_to(alone, dataset, tmp_path, 4, "--model.tied=false")


def test_a_model_of_the_same_shapes_that_computes_otherwise_is_refused(
    store: Store, alone: Start, dataset: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"(?s)model\.heads was 2 .* and is 4 here\..*model\.rope_base was 10000\.0"):
        run_to(alone, dataset, tmp_path, 4, "--model.heads=4", "--model.rope_base=500")
    run_to(alone, dataset, tmp_path, 4, "--model.kv_heads=2", "--model.feed_forward=64")  # what 0 stood for


def test_another_order_of_data_is_an_error(store: Store, alone: Start, dataset: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trained with seed 0, this run has 7"):
        run_to(alone, dataset, tmp_path, 4, "--seed=7")


def test_restored_tensors_are_those_that_were_saved_bit_for_bit(alone: Start, dataset: str, tmp_path: Path) -> None:
    _, trained = run_to(alone, dataset, tmp_path, 3)
    _, restored = run_to(alone, dataset, tmp_path, 3, "--seed=0")
    saved = model_tensors(trained)
    assert all(torch.equal(saved[name], tensor) for name, tensor in model_tensors(restored).items())
