"""Checkpoints of models that ranks split, with the state of two optimizers in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LLAMA = ("--model.heads=4", "--model.kv_heads=2", "--model.activation=swiglu", "--model.norm_weights=true")
TP2 = ("--strategy=ddp", "--sharding.tensor_parallel=2", *LLAMA)
TP2_FSDP2 = ("--strategy=fsdp2", "--sharding.tensor_parallel=2", *LLAMA)


def test_num_07_checkpoints_of_split_models_are_restored_by_others_and_theirs_by_them(
    ranks: Any, dataset: str, tiny: list[str], tmp_path: Path
) -> None:
    """Muon's state with AdamW's, to the bit: saved by 2 x 2 ranks, by replicas, by 2 ranks that split, each after a step."""
    common = (*tiny, f"--data={dataset}", f"--checkpoint.location={tmp_path}", "--checkpoint.every_steps=1", "--steps=100")

    def stage(own: tuple[str, ...], train: int) -> dict[str, Any]:
        return {"arguments": [*common, *own, "--optimizer.name=muon"], "train": train}

    def of_first(world: int, **stages: dict[str, Any]) -> dict[str, Any]:
        outcomes = ranks("reshard", world=world, longest=200.0, stages=stages)
        assert [outcome.code for outcome in outcomes] == [0] * world, outcomes[0].log
        result: dict[str, Any] = outcomes[0].result
        assert not any("error" in found for found in result.values()), result
        return result

    ddp = ("--strategy=ddp", *LLAMA)
    of_4 = of_first(4, saved=stage(TP2_FSDP2, 1))
    of_2 = of_first(2, ddp=stage(ddp, 0), step=stage(ddp, 1), tp=stage(TP2, 0), another=stage(TP2, 1))
    again = of_first(4, restored=stage(TP2_FSDP2, 0))
    assert [of_2[name]["resumed"] for name in ("ddp", "step", "tp", "another")] == [1, 1, 2, 2]
    assert again["restored"]["resumed"] == 3
    assert of_4["saved"]["digest"] == of_2["ddp"]["digest"]
    assert of_2["step"]["digest"] == of_2["tp"]["digest"]
    assert of_2["another"]["digest"] == again["restored"]["digest"]
    assert len({of_2[name]["digest"] for name in ("ddp", "step", "another")}) == 3
