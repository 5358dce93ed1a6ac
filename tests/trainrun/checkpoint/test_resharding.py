"""A checkpoint of any strategy and world size goes on in any other, to the bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainrun.checkpoint.layout import read_commit
from trainrun.checkpoint.read import read_tensors
from trainrun.store import open_store

STRATEGIES = {
    "ddp": ["--strategy=ddp"],
    "fsdp2": ["--strategy=fsdp2"],
    "zero3": ["--strategy=zero3"],
    "hybrid": ["--strategy=fsdp2", "--sharding.shard_size=2"],
    "zero1": ["--strategy=zero1"],
    "fsdp2+tp": ["--strategy=fsdp2", "--sharding.tensor_parallel=2"],
    "zero2": ["--strategy=zero2"],
}
MESHES = {
    "ddp": {"replicate": 4},
    "hybrid": {"replicate": 2, "shard": 2},
    "fsdp2+tp": {"shard": 2, "tensor": 2},
}
"""Of 4 ranks."""


RESUMED = {
    2: list(itertools.pairwise([*STRATEGIES, "ddp"])),
    8: [  # (each process that imports DeepSpeed takes seconds for it)
        *(("ddp", "fsdp2"), ("fsdp2", "ddp"), ("fsdp2+tp", "fsdp2"), ("hybrid", "ddp")),
        *(("zero1", "fsdp2+tp"), ("zero2", "ddp"), ("zero3", "hybrid")),
    ],
}
"""By ranks: which strategy reads what which one wrote."""


def stage(tiny: list[str], dataset: str, location: Path, strategy: str, *more: str, train: int = 0) -> dict[str, Any]:
    """A stage of `resharding.run_rank`."""
    arguments = [*tiny, *STRATEGIES[strategy], "--micro_batch=1", f"--data={dataset}", f"--checkpoint.location={location}"]
    arguments += ["--steps=100", "--log_every=1000", "--checkpoint.every_steps=1", *more]
    return {"arguments": arguments, "train": train}


def run_stages(ranks: Any, world: int, stages: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What rank 0 says of each stage."""
    outcomes = ranks("reshard", world=world, longest=240.0, stages=stages)
    assert [outcome.code for outcome in outcomes] == [0] * world, "\n".join(outcome.log for outcome in outcomes)
    errors = {name: result["error"] for name, result in outcomes[0].result.items() if "error" in result}
    assert not errors, errors
    found: dict[str, dict[str, Any]] = outcomes[0].result
    return found


@pytest.mark.slow
def test_num_07_saved_on_4_resumed_on_2_and_8_by_any_strategy(ranks: Any, tiny: list[str], dataset: str, tmp_path: Path) -> None:
    """Weights, buffers and both moments, gathered, are those that were saved, bit for bit."""
    saved = run_stages(ranks, 4, {name: stage(tiny, dataset, tmp_path / name, name, train=2) for name in STRATEGIES})
    for name in STRATEGIES:
        commit = read_commit(open_store(str(tmp_path / name / "run")), 2)
        assert commit.mesh == MESHES.get(name, {"shard": 4})
        sizes = [shard.length for shard in commit.shards]
        assert max(sizes) < 1.5 * min(sizes), (name, sizes)  # all ranks upload alike
    for world, pairs in RESUMED.items():
        stages = {f"{source} to {target}": stage(tiny, dataset, tmp_path / source, target) for source, target in pairs}
        found = run_stages(ranks, world, stages)
        for source, target in pairs:
            assert found[f"{source} to {target}"]["resumed"] == 2
            assert found[f"{source} to {target}"]["digest"] == saved[source]["digest"], f"{source} to {target} on {world}"


def test_num_07_there_and_back_again_trains_as_if_nothing_had_been(
    ranks: Any, tiny: list[str], dataset: str, tmp_path: Path
) -> None:
    """A step by fsdp2 on 4, one by ddp on 2, one by hybrid on 4, beside three steps of one strategy."""
    there = tmp_path / "there"
    first = run_stages(
        ranks,
        4,
        {
            "straight": stage(tiny, dataset, tmp_path / "straight", "fsdp2", train=3),
            "fsdp2": stage(tiny, dataset, there, "fsdp2", train=1),
        },
    )
    second = run_stages(
        ranks, 2, {"read": stage(tiny, dataset, there, "ddp"), "ddp": stage(tiny, dataset, there, "ddp", train=1)}
    )
    third = run_stages(
        ranks, 4, {"read": stage(tiny, dataset, there, "hybrid"), "hybrid": stage(tiny, dataset, there, "hybrid", train=1)}
    )
    assert (second["ddp"]["resumed"], third["hybrid"]["resumed"]) == (1, 2)
    assert second["read"]["digest"] == first["fsdp2"]["digest"]
    assert third["read"]["digest"] == second["ddp"]["digest"]
    losses = first["fsdp2"]["losses"] + second["ddp"]["losses"] + third["hybrid"]["losses"]
    np.testing.assert_allclose(losses, first["straight"]["losses"], rtol=1e-5)
    stores = [open_store(str(tmp_path / name / "run")) for name in ("straight", "there")]
    straight, other = (read_tensors(store, read_commit(store, 3), lambda name: name.endswith("weight")) for store in stores)
    assert straight.keys() == other.keys()
    for name, tensor in straight.items():
        np.testing.assert_allclose(other[name], tensor, atol=2e-4, err_msg=name)
