"""ZeRO's checkpoints: in low precision, from main memory and from a disk, they go on in any other strategy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

STAGES = ("zero1", "zero2", "zero3")
OFFLOAD = ("--sharding.offload_optimizer=cpu",)
OFFLOAD_ALL = (*OFFLOAD, "--sharding.offload_parameters=cpu")
FP16 = ("--precision=fp16",)
STATE = ("--sequence_length=16", "--batch_tokens=128", "--micro_batch=4", "--model.layers=1", "--model.heads=2", "--steps=100")
KEEPING = ("--checkpoint.every_steps=1", "--log_every=1000")


def restarts(ranks: Any, dataset: str, location: Path, world: int, *stages: tuple[tuple[str, ...], int]) -> list[dict[str, Any]]:
    """Runs one after the other on the same checkpoints, each with the steps that it trains; what rank 0 says of each."""
    common = [*STATE, *KEEPING, f"--data={dataset}", f"--checkpoint.location={location}"]
    plain = {str(number): {"arguments": [*common, *own], "train": train} for number, (own, train) in enumerate(stages)}
    outcomes = ranks("reshard", world=world, longest=600.0, stages=plain)
    assert [outcome.code for outcome in outcomes] == [0] * world, "\n".join(outcome.log for outcome in outcomes)
    return list(outcomes[0].result.values())


@pytest.mark.slow
def test_num_07_low_precision_and_offload_go_on_from_one_another(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """All of fp32 weights and moments, frozen parameters and the loss scale, on another number of ranks, bit for bit."""
    kinds = [
        *((f"--strategy={stage}", "--precision=bf16") for stage in STAGES),
        *((f"--strategy={stage}", *FP16, *OFFLOAD) for stage in STAGES),
        ("--strategy=zero3", *FP16, *OFFLOAD_ALL),
    ]
    small = ("--model.width=16",)
    straight = restarts(ranks, dataset, tmp_path / "straight", 2, (("--strategy=ddp", *small), 2 + 2 * len(kinds)))
    kept = tmp_path / "kept"
    on_2 = restarts(ranks, dataset, kept, 2, (("--strategy=ddp", *FP16, *small), 2), *(((*kind, *small), 1) for kind in kinds))
    stages = [((*kind, *small), train) for kind in reversed(kinds) for train in (0, 1)]
    on_4 = restarts(ranks, dataset, kept, 4, *stages, (("--strategy=fsdp2", *small), 0))
    assert not any(result.get("error") for result in (*on_2, *on_4))
    written, read = [on_2[-1], *on_4[1::2]], on_4[::2]
    assert [result["digest"] for result in read] == [result["digest"] for result in written]
    assert read[0]["values"]["strategy/loss_scale"] == on_2[-1]["values"]["strategy/loss_scale"]
    losses = [loss for result in (*on_2, *on_4) for loss in result["losses"]]
    np.testing.assert_allclose(losses, straight[0]["losses"], rtol=1e-2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_offload_to_a_disk_is_done_or_refused_with_what_to_install(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """Where libaio is, DeepSpeed compiles its part at first. The model is large enough for DeepSpeed to use the disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    nvme = ("--strategy=zero3", "--sharding.offload_optimizer=nvme", f"--sharding.nvme_path={folder}", "--model.width=512")
    all_nvme = (*nvme, "--sharding.offload_parameters=nvme", "--precision=bf16")
    other = ("--strategy=fsdp2", "--model.width=512")
    first, second, third, fourth, last = restarts(
        ranks, dataset, tmp_path / "kept", 2, (other, 1), (nvme, 0), (nvme, 1), (all_nvme, 1), (other, 0)
    )
    if can_offload_to_a_disk():
        assert list(folder.rglob("exp_avg*"))
        assert second["digest"] == first["digest"]
        assert (third["resumed"], fourth["resumed"], last["resumed"]) == (1, 2, 3)
        assert last["digest"] == fourth["digest"]
        assert third["losses"] > fourth["losses"]
    else:
        for refused in (second, third, fourth):
            assert 'Offload to "nvme" ' in refused["error"]
            assert "Install" in refused["error"]


def can_offload_to_a_disk() -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible()) and shutil.which("ninja") is not None
