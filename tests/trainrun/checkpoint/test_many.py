"""A hundred saves in a row leave no more behind than twenty do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainrun.checkpoint.layout import committed_steps, read_commit
from trainrun.store import open_store

MIB = 1024**2
FEW, MANY = 20, 100
GROWTH = 4 * MIB
"""That chance may make; a snapshot that each save left behind would be more than fifty times as much."""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not tell a process's own memory")
@pytest.mark.parametrize(("kind", "world"), [("directory", 2), ("s3", 1)])
def test_a_hundred_saves_leave_memory_files_and_commits_as_twenty_do(
    ranks: Any, tiny: list[str], dataset: str, tmp_path: Path, bucket: str, kind: str, world: int
) -> None:
    location = str(tmp_path) if kind == "directory" else f"s3://{bucket}"
    arguments = [*tiny, f"--data={dataset}", "--model.width=128", f"--steps={MANY}", "--log_every=1000"]
    arguments += ["--checkpoint.every_steps=1", "--checkpoint.keep=3", f"--checkpoint.location={location}"]
    outcomes = ranks("many", world=world, longest=240.0, arguments=arguments, look_at=[FEW, MANY])
    assert [outcome.code for outcome in outcomes] == [0] * world, outcomes[0].log
    store = open_store(f"{location}/run")
    assert committed_steps(store) == [MANY - 2, MANY - 1, MANY]
    assert read_commit(store, MANY).bytes * (MANY - FEW) > 50 * GROWTH
    assert len({item.key.split("/")[0] for item in store.list()}) == 3
    for outcome in outcomes:
        few, many = outcome.result[str(FEW)], outcome.result[str(MANY)]
        assert few.keys() == many.keys()  # the same writer all the time
        assert len(few) == 2
        for name, held in many.items():
            assert held["own"] + held["shared"] < few[name]["own"] + few[name]["shared"] + GROWTH, (name, few, many)
            assert held["files"] <= few[name]["files"] + 3, (name, few, many)  # a connection more or less
