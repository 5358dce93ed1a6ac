"""A run that is killed with a save on its way goes on as if nothing had been, bit for bit, by every strategy."""

from __future__ import annotations

import itertools
import signal
from typing import Any

import pytest
from fault_store import FaultStore

from trainrun.checkpoint.layout import committed_steps
from trainrun.store import open_store

CPU = ("--sharding.offload_optimizer=cpu", "--sharding.offload_parameters=cpu")
STRATEGIES: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "ddp": ("--strategy=ddp",),
        "fsdp2": ("--strategy=fsdp2",),
        "fsdp2-offload": ("--strategy=fsdp2", *CPU),
        "tp": ("--strategy=ddp", "--sharding.tensor_parallel=2"),
        "zero1": ("--strategy=zero1",),
        "zero2": ("--strategy=zero2", "--precision=fp16"),
        "zero2-offload": ("--strategy=zero2", "--precision=bf16", "--sharding.offload_optimizer=cpu"),
        "zero3": ("--strategy=zero3",),
        "zero3-offload": ("--strategy=zero3", "--precision=fp16", *CPU),
    },
    4: {
        "hybrid": ("--strategy=fsdp2", "--sharding.shard_size=2"),
        "tp-fsdp2": ("--strategy=fsdp2", "--sharding.tensor_parallel=2"),
    },
}
"""By ranks."""

STEPS, EVERY, KILLED_IN = 9, 2, 6
SCHEDULE = [f"--steps={STEPS}", f"--checkpoint.every_steps={EVERY}", "--checkpoint.keep=9", "--micro_batch=1", "--log_every=1000"]


@pytest.mark.slow
@pytest.mark.parametrize("world", STRATEGIES)
def test_num_08_killed_with_a_save_on_its_way_every_strategy_goes_on_bit_for_bit(
    ranks: Any, faults: FaultStore, tiny: list[str], dataset: str, bucket: str, world: int
) -> None:
    """Losses, rates, data, weights and moments after each step, with dropout and accumulation. Step 2 is committed, and the
    shards of step 4 are on their way, when all ranks are killed in the middle of step 6."""
    common = [*tiny, *SCHEDULE, f"--data={dataset}"]
    own = {name: [*common, *strategy] for name, strategy in STRATEGIES[world].items()}
    straight = _results(ranks, world, own)  # without a location: whether it saves changes nothing either
    on_s3 = {name: [*a, f"--checkpoint.location=s3://{bucket}/{name}"] for name, a in own.items()}
    faults.fail("PUT .*/step-000000004/", "silence")
    seen = [rf"PUT /{bucket}/NAME/run/step-000000004/.*/rank-{rank:05}" for rank in range(world)]
    killed = _results(ranks, world, on_s3, kill={"step": KILLED_IN, "seen": seen})
    assert killed == [dict.fromkeys(own, -signal.SIGKILL)] * world
    for name in own:
        assert committed_steps(open_store(f"s3://{bucket}/{name}/run")) == [2]
    faults.heal()
    resumed = _results(ranks, world, on_s3)
    for name, rank in itertools.product(own, range(world)):
        whole, rest = straight[rank][name], resumed[rank][name]
        assert (whole["resumed"], rest["resumed"]) == (0, 2), name
        for of_each_step in ("losses", "rates", "seen"):
            assert rest[of_each_step] == whole[of_each_step][2:], (name, of_each_step)
        assert rest["digests"] == {step: whole["digests"][step] for step in rest["digests"]}, name
        assert len(rest["digests"]) == STEPS - 1
        assert rest["tokens"] == whole["tokens"]
    for name in own:
        assert committed_steps(open_store(f"s3://{bucket}/{name}/run")) == [2, 4, 6, 8, 9]


def _results(ranks: Any, world: int, runs: dict[str, list[str]], **keywords: Any) -> list[dict[str, Any]]:
    outcomes = ranks("bitwise", world=world, longest=240.0, runs=runs, **keywords)
    assert [outcome.code for outcome in outcomes] == [0] * world, "\n".join(outcome.log for outcome in outcomes)
    return [outcome.result for outcome in outcomes]
