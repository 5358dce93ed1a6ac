"""Whatever a save was doing when its process was killed: a reader gets the checkpoint before or the new one, whole, and the run
that is started again commits over the debris."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import crash
import moto.s3.models
import pytest
from fault_store import FaultStore

from trainrun.checkpoint.damage import find_damage
from trainrun.checkpoint.layout import committed_steps, read_commit
from trainrun.checkpoint.read import newest_good, read_tensors
from trainrun.store import Store, open_store

Harm = Callable[[crash.RankWriter], None]


class Folder:
    """The checkpoints of a run whose writers of one rank after the other are harmed."""

    def __init__(self, url: str, healthy: Sequence[crash.RankWriter]) -> None:
        """There are checkpoints of steps 1 and 2, so that from step 3 on each save has one to delete."""
        self.url, self.store, self._healthy = url, open_store(url), healthy
        self.step = 0
        for _ in range(crash.KEEP):
            self.go_on()

    def go_on(self) -> None:
        """Save the next step, as the run does that is started after a kill."""
        self.step += 1
        *_, last = crash.save(self._healthy, self.url, self.step, f"again-{self.step}")
        assert last == "pruned"
        assert readable(self.store) == self.step
        assert len(committed_steps(self.store)) == min(self.step, crash.KEEP)

    def save_with(self, victim: crash.RankWriter, attempt: str) -> bool:
        """Save the next step with ``victim`` in its rank's place. Returns whether that came to its end; if not, looks at what
        a reader finds, and goes on from there."""
        done = []
        try:
            for each in crash.save(
                [victim if rank == victim.rank else writer for rank, writer in enumerate(self._healthy)],
                self.url,
                self.step + 1,
                attempt,
            ):
                done.append(each)
        except crash.Lost:
            pass
        newest = readable(self.store)
        assert newest in ([self.step + 1] if "committed" in done else [self.step, self.step + 1])
        self.step = newest
        if "pruned" in done:
            return True
        self.go_on()
        return False


def readable(store: Store) -> int:
    """The newest checkpoint; nothing in the store is damaged."""
    for step in committed_steps(store):
        assert not find_damage(store, read_commit(store, step))
    commit, found = newest_good(store, lambda commit: read_tensors(store, commit, lambda name: True), warn=pytest.fail)
    assert found["model/w"].tolist() == [float(commit.step)] * (crash.WORLD * crash.ELEMENTS)
    return commit.step


@pytest.fixture
def healthy() -> Iterator[list[crash.RankWriter]]:
    with crash.writer(0) as first, crash.writer(1) as second:
        yield [first, second]


@pytest.fixture
def bucket_folder(faults: FaultStore, bucket: str, monkeypatch: pytest.MonkeyPatch, healthy: list[crash.RankWriter]) -> Folder:
    """On an S3 that takes parts of any size."""
    monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", 1)
    return Folder(f"s3://{bucket}/run", healthy)


def test_ckpt_01_killed_before_any_change_of_a_directory(tmp_path: Path, healthy: list[crash.RankWriter]) -> None:
    """Of each rank's writer before each folder, file, rename, link and removal that it makes."""
    folder = Folder(str(tmp_path / "run"), healthy)
    points = {}
    for rank in range(crash.WORLD):
        for points[rank] in itertools.count():
            with crash.writer(rank, folder=folder.url, changes=points[rank]) as victim:
                if folder.save_with(victim, f"killed-{rank}-{points[rank]}"):
                    break
                victim.process.join()
                assert victim.process.exitcode == -signal.SIGKILL
    # A shard and its description are a file and a rename each, in two new folders; a COMMIT is a file, a link and a removal; and
    # a checkpoint of five objects is removed, with its two folders.
    assert points[1] >= 6
    assert points[0] >= 4 + 3 + 5 + 2


def test_ckpt_01_killed_after_any_request_that_changes_a_bucket(faults: FaultStore, bucket_folder: Folder) -> None:
    """After each part and object of each rank, and each deletion, before the writer hears of it."""
    requests: list[str] = []
    for rank in range(crash.WORLD):
        for number in itertools.count():
            faults.fail(changes_of(rank), "hold", skip=number, times=1)
            with crash.writer(rank) as victim:
                held = save_and_harm(faults, bucket_folder, victim, f"killed-{rank}-{number}", crash.RankWriter.kill)
            if held is None:
                break
            requests.append(held)
    kinds = {"uploads": 2, "partNumber": 6, "POST": 6, "00001.json": 1, "00000.json": 1, "COMMIT": 1, "?delete": 2}
    assert {kind: sum(kind in request for request in requests) for kind in kinds} == kinds, requests
    assert len(requests) == 15, requests


def test_ckpt_01_a_writer_whose_rank_was_killed_ends_in_the_midst_of_a_request(faults: FaultStore, bucket_folder: Folder) -> None:
    def orphan(writer: crash.RankWriter) -> None:
        writer.abandon()
        writer.process.join(crash.LONGEST)
        assert writer.process.exitcode == 0

    points = ((1, "partNumber=2"), (0, r"rank-00000\.json"), (0, "COMMIT"), (0, r"\?delete"))
    for number, (rank, request) in enumerate(points):
        faults.fail(changes_of(rank) + ".*" + request, "silence", times=1)
        with crash.writer(rank) as victim:
            assert save_and_harm(faults, bucket_folder, victim, f"orphaned-{number}", orphan)


def changes_of(rank: int) -> str:
    """A pattern of requests by which this rank's writer changes a bucket."""
    return "^(PUT|POST|DELETE) " + ("(?=.*rank-00001)" if rank == 1 else "(?!.*rank-00001)")


def save_and_harm(faults: FaultStore, folder: Folder, victim: crash.RankWriter, attempt: str, harm: Harm) -> str | None:
    """Save with ``victim``, which is harmed as soon as a request stays unanswered; that request, None when there was none."""
    with ThreadPoolExecutor(1) as beside:
        saving = beside.submit(folder.save_with, victim, attempt)
        saving.add_done_callback(lambda _: faults.unanswered.put(""))
        request = faults.unanswered.get(timeout=crash.LONGEST)
        if request:
            harm(victim)
            assert faults.unanswered.get(timeout=crash.LONGEST) == ""
        faults.heal()
        assert saving.result() == (not request)
        return request or None
