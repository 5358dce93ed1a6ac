"""What becomes of checkpoints that are damaged, half gone or not finished when a run goes on beside them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundled_loop import train

from trainrun.checkpoint import restore
from trainrun.checkpoint.damage import find_damage
from trainrun.checkpoint.layout import commit_key, committed_steps, read_commit
from trainrun.directory import DirectoryStore
from trainrun.errors import CheckpointError
from trainrun.run import Run
from trainrun.store import Store, StoreError, open_store

Start = Callable[..., Run]


def go_on(alone: Start, dataset: str, folder: Path, steps: int) -> Run:
    run = alone(f"--data={dataset}", f"--steps={steps}", "--checkpoint.every_steps=1", f"--checkpoint.location={folder}")
    train(run)
    return run


@pytest.fixture
def store(alone: Start, dataset: str, tmp_path: Path) -> Store:
    """A run's folder with checkpoints of steps 1, 2 and 3."""
    go_on(alone, dataset, tmp_path, 3)
    return open_store(str(tmp_path / "run"))


def flip(store: Store, key: str) -> None:
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))


def test_several_damaged_in_a_row_in_different_ways_are_set_aside_with_their_shards(
    store: Store, alone: Start, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = {step: read_commit(store, step).shards[0].key for step in (2, 3)}
    flip(store, shards[3])
    flip(store, commit_key(2))
    run = go_on(alone, dataset, tmp_path, 3)
    told = capsys.readouterr().err
    assert "the checkpoint of step 3 is damaged: rank 0: " in told
    assert shards[3] in told
    assert "sha256 differs" in told
    assert "step 2 was set aside as damaged" in told
    assert "Resumed from step 1" in told
    assert run.completed == 3
    keys = {item.key for item in store.list()}
    assert keys >= set(shards.values())
    assert sum("/DAMAGED-" in key for key in keys) == 2
    for step in committed_steps(store):
        assert not find_damage(store, read_commit(store, step))


def test_shards_without_a_commit_are_no_checkpoint_and_stay(
    store: Store, alone: Start, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = read_commit(store, 3).shards[0].key
    store.delete([commit_key(3)])
    go_on(alone, dataset, tmp_path, 3)
    told = capsys.readouterr().err
    assert "damaged" not in told
    assert "Resumed from step 2" in told
    assert shard in {item.key for item in store.list()}


def test_a_run_goes_on_from_a_store_that_it_cannot_write(
    store: Store, alone: Start, dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(store, read_commit(store, 3).shards[0].key)

    def refuse(self: DirectoryStore, key: str, *arguments: Any, **more: Any) -> None:
        raise StoreError(f"Could not write {key}: it is read-only.")

    monkeypatch.setattr(DirectoryStore, "put", refuse)
    run = alone(f"--data={dataset}", "--steps=2", f"--checkpoint.location={tmp_path}")
    train(run)
    told = capsys.readouterr().err
    assert "the damaged checkpoint of step 3 could not be set aside (Could not write" in told
    assert "Resumed from step 2" in told
    assert committed_steps(store) == [1, 2, 3]


def test_of_two_runs_that_find_the_same_damage_the_later_leaves_what_the_other_has_committed_since(
    store: Store, alone: Start, dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = store.get(commit_key(3))
    flip(store, commit_key(3))
    set_aside = restore.Restore._set_aside

    def late(self: restore.Restore, *arguments: Any, **more: Any) -> None:
        store.put(commit_key(3), good)  # the other run was here meanwhile
        set_aside(self, *arguments, **more)

    monkeypatch.setattr(restore.Restore, "_set_aside", late)
    run = alone(f"--data={dataset}", "--steps=2", f"--checkpoint.location={tmp_path}")
    train(run)
    assert run.completed == 2
    assert store.get(commit_key(3)) == good
    assert not any("DAMAGED" in item.key for item in store.list())


def test_ckpt_02_a_rank_that_does_not_find_what_is_listed_fails_the_restore_and_condemns_nothing(
    store: Store, alone: Start, dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = read_commit(store, 3).shards[0].key
    path = Path(store.url, shard)
    lacking = restore.read.lacking

    def then_gone(*arguments: Any) -> str | None:
        found = lacking(*arguments)
        path.unlink()
        return found

    monkeypatch.setattr("trainrun.checkpoint.read.lacking", then_gone)
    with pytest.raises(CheckpointError, match=rf"rank 0 does not find what is in the listing: .*{shard}"):
        go_on(alone, dataset, tmp_path, 4)
    assert committed_steps(store) == [1, 2, 3]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["data"].update(position="x"),
        lambda d: d["data"].pop("position"),
        lambda d: d["settings"].update(optimizer=5),
        lambda d: d["shards"][0]["values"].update({"rng/0/numpy": 5}),
        lambda d: d["shards"][0]["values"].update({"rng/0/python": [3]}),
        lambda d: d["shards"][0]["values"].pop("rng/0/numpy"),
    ],
    ids=range(6),
)
def test_values_that_cannot_be_used_are_damage(
    store: Store,
    alone: Start,
    dataset: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], Any],
) -> None:
    document = json.loads(store.get(commit_key(3)))
    change(document)
    content = {key: value for key, value in document.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    store.put(commit_key(3), json.dumps({**content, "sha256": digest}).encode())
    run = alone(f"--data={dataset}", "--steps=2", f"--checkpoint.location={tmp_path}")
    train(run)
    told = capsys.readouterr().err
    assert "cannot be used" in told
    assert "Resumed from step 2" in told
