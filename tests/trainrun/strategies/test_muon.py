"""Muon takes the same steps however its matrices are sharded: each is gathered whole before it is orthogonalised.

That on one process its steps are those of PyTorch's own classes is shown in `test_optimizer`.
"""

from __future__ import annotations

from parity import Configuration, RunsRanks, Tolerance, differences, train_all

MODEL = ("--steps=20", "--optimizer.name=muon", "--micro_batch=4", "--model.heads=4", "--model.norm_weights=true")
DDP = Configuration(("--strategy=ddp", *MODEL))
FSDP2 = Configuration(("--strategy=fsdp2", *MODEL))
HYBRID = Configuration(("--strategy=fsdp2", "--sharding.shard_size=2", *MODEL))
TP_FSDP2 = Configuration(("--strategy=fsdp2", "--sharding.tensor_parallel=2", *MODEL))

NEAR = Tolerance(loss=5e-4, norm=5e-3, parameters=1e-2)
"""The iteration is in bf16, so that how a gradient was rounded when it was summed shows."""


def test_muon_takes_the_same_steps_on_any_number_of_ranks(lasting_ranks: RunsRanks, dataset: str) -> None:
    alone = train_all(lasting_ranks, dataset, {"ddp": DDP}, world=1)["ddp"]
    on_2 = train_all(lasting_ranks, dataset, {"ddp": DDP, "fsdp2": FSDP2, "tp": TP_FSDP2}, world=2)
    on_4 = train_all(lasting_ranks, dataset, {"ddp": DDP, "hybrid": HYBRID, "tp+fsdp2": TP_FSDP2}, world=4)
    for name, trained in [*on_2.items(), *on_4.items()]:
        found = differences(trained, alone)
        assert found.within(NEAR), (name, found)
        assert trained.rates == alone.rates
