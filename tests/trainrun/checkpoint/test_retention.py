"""What is kept, what goes, and that a reader always finds the newest checkpoint that is whole, whatever goes wrong when."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_store import MemoryStore

from trainrun.checkpoint.layout import (
    Commit,
    Damaged,
    Entry,
    Shard,
    commit_key,
    committed_steps,
    new_attempt,
    read_commit,
    shard_key,
    step_directory,
)
from trainrun.checkpoint.retention import EVIDENCE_SECONDS, Retention
from trainrun.settings import CheckpointSettings
from trainrun.store import Store, StoreError, StoreKeyMissing

WORLD = 2
TIMEOUT = 300.0


def policy(**settings: object) -> CheckpointSettings:
    return CheckpointSettings(every_steps="auto", timeout_seconds=TIMEOUT, **settings)  # type: ignore[arg-type]


def write_shard(store: MemoryStore, step: int, attempt: str, rank: int) -> Shard:
    data = bytes([step % 251, rank, 1, 2])
    digest = hashlib.sha256(data).hexdigest()
    key = shard_key(step, attempt, rank)
    store.put(key, data)
    entry = Entry(offset=0, length=4, dtype="float32", shape=(2,), slice=((rank, rank + 1),), sha256=digest)
    return Shard(key=key, length=4, sha256=digest, tensors={"model/w": (entry,)})


def write_checkpoint(store: MemoryStore, step: int, metric: float | None = None) -> Commit:
    attempt = new_attempt()
    shards = tuple(write_shard(store, step, attempt, rank) for rank in range(WORLD))
    commit = Commit(
        run="run", step=step, tokens=0, attempt=attempt, time=0.0, world=WORLD, mesh={}, data={}, settings={}, versions={},
        shards=shards, metric=metric,
    )  # fmt: skip
    assert store.put_new(commit_key(step), commit.to_json().encode())
    return commit


def is_whole(store: Store, step: int) -> bool:
    try:
        commit = read_commit(store, step)
        return all(hashlib.sha256(store.get(shard.key)).hexdigest() == shard.sha256 for shard in commit.shards)
    except (Damaged, StoreKeyMissing):
        return False


def newest_whole(store: Store) -> int | None:
    """What a reader takes: COMMITs from the newest down, until one is whole."""
    return next((step for step in reversed(committed_steps(store)) if is_whole(store, step)), None)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_ckpt_05_the_newest_by_number_are_kept(store: MemoryStore) -> None:
    steps = list(range(9000, 10001, 100))
    for step in reversed(steps):
        write_checkpoint(store, step)
    Retention(store, policy(keep=10)).prune()
    assert committed_steps(store) == steps[1:]
    assert not list(store.list("step-000009000"))
    assert all(is_whole(store, step) for step in steps[1:])


def test_ckpt_05_neither_text_nor_time_decides_which_is_newest(store: MemoryStore) -> None:
    for age, step in ((5000, 2), (3000, 10), (9000, 100), (10, 10**9)):
        store.now = 1e9 - age
        write_checkpoint(store, step)
    Retention(store, policy(keep=2)).prune()
    assert committed_steps(store) == [100, 10**9]


def test_the_first_at_or_after_each_multiple_is_kept_for_its_step(store: MemoryStore) -> None:
    retention = Retention(store, policy(keep=2, keep_every_steps=100))
    for step in (30, 90, 110, 150, 200, 260, 420, 480, 510, 530, 540):
        write_checkpoint(store, step)
        plan = retention.prune()
    assert committed_steps(store) == [110, 200, 420, 510, 530, 540]
    assert plan.kept == {
        110: ("step",), 200: ("step",), 420: ("step",), 510: ("step",), 530: ("newest",), 540: ("newest",)
    }  # fmt: skip


@pytest.mark.parametrize(("best", "kept"), [("lowest", [3, 4, 7, 8]), ("highest", [2, 5, 7, 8])])
def test_the_best_by_their_metric_are_kept(store: MemoryStore, best: str, kept: list[int]) -> None:
    retention = Retention(store, policy(keep=2, keep_best=2, best=best))
    for step, metric in enumerate((None, 2.0, 9.5, 1.0, 1.5, 7.0, float("nan"), None, 3.0)):
        if step:
            write_checkpoint(store, step, metric)
            retention.prune()
    assert committed_steps(store) == kept


def test_of_equal_metrics_the_newer_is_better(store: MemoryStore) -> None:
    for step in range(1, 6):
        write_checkpoint(store, step, 1.0)
    Retention(store, policy(keep=2, keep_best=3)).prune()
    assert committed_steps(store) == [3, 4, 5]


def test_a_commit_is_deleted_before_its_shards_and_what_stays_is_not_touched(store: MemoryStore) -> None:
    for step in (1, 2, 3, 4):
        write_checkpoint(store, step)
    plan = Retention(store, policy(keep=2)).prune()
    assert store.deleted[:2] == [commit_key(1), commit_key(2)]
    assert all(key.startswith(("step-000000001/", "step-000000002/")) for key in store.deleted)
    assert plan.deleted_steps == (1, 2)
    assert plan.bytes == sum(len(data.data) for data in store.objects.values())  # as much as stays: two like these two


def test_what_may_be_in_flight_stays_and_what_was_abandoned_goes(store: MemoryStore) -> None:
    write_checkpoint(store, 10)
    old = dict(store.objects)
    store.now += 5000
    write_shard(store, 20, "abandoned", 0)
    write_shard(store, 20, "slow", 0)
    store.put("step-000000020/slow/rank-00000.json", b"{}")
    write_shard(store, 10, "lost-the-race", 1)
    store.put("step-000000010/COMMIT.json.af.partial", b"")
    store.put("step-000000010/VERIFIED.json", b"")  # whatever lies beside a commit that stays
    store.now += 2 * TIMEOUT + 1
    write_shard(store, 20, "in-flight", 1)
    kept = {*old, shard_key(20, "in-flight", 1), "step-000000010/VERIFIED.json"}
    retention = Retention(store, policy())
    retention.prune(in_flight=["slow"])
    assert set(store.objects) == {*kept, shard_key(20, "slow", 0), "step-000000020/slow/rank-00000.json"}
    retention.prune()
    assert set(store.objects) == kept


def test_nobody_elses_folder_is_touched(store: MemoryStore) -> None:
    store.put("metrics/lines.jsonl", b"1")
    store.put("step-by-step.txt", b"2")
    store.put("step-12/notes.txt", b"3")
    inside = ["step-000000300", "step-000000003/hf/model.safetensors", "step-000000001/my notes/a.txt", "step-000000009/x.txt"]
    for key in inside:
        store.put(key, b"4")
    store.now += 1e6
    for step in (1, 2, 3):
        write_checkpoint(store, step)
    Retention(store, policy(keep=2)).prune()
    assert committed_steps(store) == [2, 3]
    assert {"metrics/lines.jsonl", "step-by-step.txt", "step-12/notes.txt", *inside} <= set(store.objects)


@pytest.mark.parametrize("damage", ["commit", "missing shard", "short shard", "another version"])
def test_what_is_known_to_be_damaged_does_not_count(store: MemoryStore, damage: str) -> None:
    for step in (1, 2, 3):
        commit = write_checkpoint(store, step, metric=0.0 if step == 3 else 1.0)
    if damage == "commit":
        store.put(commit_key(3), b'{"schema": 2')
    elif damage == "missing shard":
        store.delete([commit.shards[1].key])
    elif damage == "short shard":
        store.put(commit.shards[1].key, b"123")
    else:
        other = commit.__class__(**{**commit.__dict__, "schema": 99})
        store.put(commit_key(3), other.to_json().encode())
    before = set(store.objects)
    retention = Retention(store, policy(keep=2, keep_best=1))
    plan = retention.prune()
    assert set(plan.kept) == {1, 2}
    assert set(plan.damaged) == {3}
    assert set(store.objects) == before, "it is for the next restart to judge"
    store.now += EVIDENCE_SECONDS + 1
    for step in (4, 5):
        write_checkpoint(store, step)
    retention.prune()
    assert set(committed_steps(store)) == {2, 4, 5, *([3] if damage == "another version" else [])}


def test_what_was_set_aside_stays_for_a_week(store: MemoryStore) -> None:
    write_checkpoint(store, 1)
    damaged = write_checkpoint(store, 2)
    store.now += 1e5
    evidence = "step-000000002/DAMAGED-now.json"
    store.put(evidence, store.get(commit_key(2)))
    store.delete([commit_key(2)])
    store.now += 10
    write_shard(store, 2, "abandoned-later", 0)
    retention = Retention(store, policy(keep=2))
    store.now += EVIDENCE_SECONDS - 20
    again = write_checkpoint(store, 2)
    retention.prune()
    assert {evidence, *(shard.key for shard in damaged.shards)} <= set(store.objects)
    assert shard_key(2, "abandoned-later", 0) not in store.objects
    store.now += 20
    write_checkpoint(store, 3)
    retention.prune()
    assert set(store.objects) == {
        shard.key for step in (2, 3) for shard in read_commit(store, step).shards
    } | {commit_key(2), commit_key(3)}  # fmt: skip
    assert read_commit(store, 2).attempt == again.attempt


def test_each_commit_is_read_once(store: MemoryStore) -> None:
    retention = Retention(store, policy(keep=3, keep_every_steps=10))
    for step in range(1, 41):
        write_checkpoint(store, step)
        retention.prune()
    assert sorted(store.reads) == sorted(commit_key(step) for step in range(1, 41))


def test_the_writer_needs_no_torch_for_it() -> None:
    code = "import sys, trainrun.checkpoint.retention; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Life(RuleBasedStateMachine):
    """Saves that succeed, fail and are damaged, restarts that set aside what is damaged, and retention that may break off."""

    @initialize(
        keep=st.integers(2, 4),
        every=st.sampled_from([0, 3, 10]),
        best=st.integers(0, 2),
        direction=st.sampled_from(["lowest", "highest"]),
    )
    def begin(self, keep: int, every: int, best: int, direction: str) -> None:
        self.store = MemoryStore()
        self.settings = policy(keep=keep, keep_every_steps=every, keep_best=best, best=direction if best else "lowest")
        self.retention = Retention(self.store, self.settings)
        self.step = 0
        self.whole: set[int] = set()
        self.flipped: set[int] = set()
        """Damage that no listing shows: at most one at a time, for `keep` is made for as many less one."""

    @rule(steps=st.integers(1, 7), metrics=st.lists(st.none() | st.floats(0, 1), min_size=2, max_size=5))
    def save(self, steps: int, metrics: list[float | None]) -> None:
        for metric in metrics:
            self.step += steps
            if self.step not in committed_steps(self.store):
                write_checkpoint(self.store, self.step, metric)
                self.whole.add(self.step)

    @rule(steps=st.integers(1, 7), shards=st.integers(1, WORLD))
    def fail_to_save(self, steps: int, shards: int) -> None:
        self.step += steps
        attempt = new_attempt()
        for rank in range(shards):
            write_shard(self.store, self.step, attempt, rank)

    @rule(seconds=st.sampled_from([1.0, 3 * TIMEOUT, 1.1 * EVIDENCE_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.store.now += seconds

    @precondition(lambda self: len(self.whole) > 1)
    @rule(
        first=st.integers(0, 1), hows=st.lists(st.sampled_from(["garbage", "missing", "short", "flip"]), min_size=1, max_size=4)
    )
    def damage(self, first: int, hows: list[str]) -> None:
        """Some of the newest, but not the last whole one: then there would be nothing to look for."""
        for how, step in zip(hows, sorted(self.whole, reverse=True)[first:], strict=False):
            if len(self.whole) > 1 and (how != "flip" or not self.flipped & set(committed_steps(self.store))):
                self.harm(step, how)
                self.whole.discard(step)

    def harm(self, step: int, how: str) -> None:
        shard = read_commit(self.store, step).shards[-1]
        if how == "garbage":
            self.store.objects[commit_key(step)].data = b"garbage"
            self.store.objects[commit_key(step)].modified += 1e-3  # as every store tells of another content
        elif how == "missing":
            del self.store.objects[shard.key]
        elif how == "short":
            self.store.objects[shard.key].data = b"1"
        else:
            self.store.objects[shard.key].data = b"flip"
            self.flipped.add(step)

    @rule(deletions=st.sampled_from([float("inf"), 0, 1, 2, 5]))
    def prune(self, deletions: float) -> None:
        before = newest_whole(self.store)
        self.store.deletions_left = deletions
        with suppress(StoreError):
            self.retention.prune()
        self.store.deletions_left = float("inf")
        assert newest_whole(self.store) == before
        self.whole &= set(committed_steps(self.store))

    @rule()
    def restart(self) -> None:
        """As a restore does: what is damaged above the newest whole one is set aside, and training goes on from there."""
        newest = newest_whole(self.store)
        for step in committed_steps(self.store):
            if newest is not None and step > newest:
                self.store.put(f"{step_directory(step)}/DAMAGED-{new_attempt()}.json", self.store.get(commit_key(step)))
                self.store.delete([commit_key(step)])
        self.retention = Retention(self.store, self.settings)
        self.step = newest or 0

    @invariant()
    def a_reader_finds_the_newest_whole_one(self) -> None:
        if hasattr(self, "store"):
            assert newest_whole(self.store) == max(self.whole, default=None)


Life.TestCase.settings = hypothesis_settings(max_examples=150, stateful_step_count=20, deadline=None)
TestLife = Life.TestCase
