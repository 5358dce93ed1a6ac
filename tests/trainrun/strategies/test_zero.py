"""DeepSpeed's ZeRO takes the steps of one plain loop, on 1, 2 and 4 processes, and refuses what it would do otherwise."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from parity import Configuration, RunsRanks, check, reference, train_all
from torch import Tensor, nn

from trainrun.checkpoint.parts import cover
from trainrun.config import ConfigError
from trainrun.models.huggingface import HuggingFaceModel
from trainrun.ranks import Ranks, leave
from trainrun.settings import TrainSettings
from trainrun.settle import settle
from trainrun.strategies.zero import ZeRO
from trainrun.strategies.zero_engine import engine_configuration
from trainrun.strategies.zero_parts import boxes

STAGES = ("zero1", "zero2", "zero3")
OFFLOAD = ("--sharding.offload_optimizer=cpu",)
OFFLOAD_ALL = (*OFFLOAD, "--sharding.offload_parameters=cpu")
SHORT = ("--steps=8",)
FP16 = ("--precision=fp16",)

WHOLE = {
    **{f"{stage}-fp32": Configuration((f"--strategy={stage}", "--micro_batch=2")) for stage in STAGES},
    **{f"{stage}-offload-fp32": Configuration((f"--strategy={stage}", *OFFLOAD, "--micro_batch=2")) for stage in STAGES},
    "zero3-offload-all-fp32": Configuration(("--strategy=zero3", *OFFLOAD_ALL, "--micro_batch=2")),
}
"""50 steps of 8 sequences: 4, 2 and 1 micro-batches on 1, 2 and 4 processes."""

LOW = {
    f"{stage}-{precision}": Configuration((f"--strategy={stage}", f"--precision={precision}", "--micro_batch=2"))
    for stage in STAGES
    for precision in ("bf16", "fp16")
}

ACCUMULATION = {
    f"{stage}{'-offload' if more else ''}-{precision}-{size}": Configuration(
        (f"--strategy={stage}", f"--precision={precision}", f"--micro_batch={size}", *more, *SHORT), masked=True
    )
    for stage in STAGES
    for precision, more in (("fp32", ()), ("bf16", ()), ("bf16", OFFLOAD))
    for size in (1, 3)
}
"""Of 4 sequences a rank: 4 micro-batches, or 2 of 3 and 1; each with another number of valid tokens."""

OVERFLOW = {
    f"{stage}{'-offload' if more else ''}-overflow": Configuration(
        (f"--strategy={stage}", *FP16, *SHORT, *more, "--micro_batch=2", "--optimizer.clip_norm=1.0"), overflow_at=3
    )
    for stage in STAGES
    for more in ((), OFFLOAD)
}

VARIANTS = {
    **{
        f"{stage}-{kind}": Configuration((f"--strategy={stage}", *SHORT, f"--activation_checkpointing={kind}"))
        for stage in STAGES
        for kind in ("selective", "full")
        if (stage, kind) != ("zero3", "selective")  # refused
    },
    **{
        f"{stage}-frozen-{precision}": Configuration(
            (f"--strategy={stage}", *SHORT, f"--precision={precision}"),
            frozen=("embedding.weight", "blocks.0.attention.keys.weight"),
        )
        for stage in STAGES
        for precision in ("fp32", "bf16")
    },
    **{
        f"{stage}-meta-{precision}": Configuration(
            (f"--strategy={stage}", *SHORT, f"--precision={precision}", "--model.tied=false"), meta=True
        )
        for stage in STAGES
        for precision in ("fp32", "bf16")
    },
    **{
        f"zero3-offload-{what}-{precision}": Configuration(("--strategy=zero3", *SHORT, *where, f"--precision={precision}"))
        for what, where in {"parameters": OFFLOAD_ALL[1:], "all": OFFLOAD_ALL}.items()
        for precision in ("fp32", "bf16", "fp16")
    },
    **{f"{stage}-unclipped": Configuration((f"--strategy={stage}", *SHORT, "--optimizer.clip_norm=0")) for stage in STAGES},
    "zero2-round-robin": Configuration(
        ("--strategy=zero2", *SHORT, '--deepspeed={"zero_optimization": {"stage": 2, "round_robin_gradients": true}}')
    ),
    "zero3-sub-groups": Configuration(
        ("--strategy=zero3", *SHORT, '--deepspeed={"zero_optimization": {"stage": 3, "sub_group_size": 2000}}')
    ),
}

ON = {1: WHOLE, 2: {**WHOLE, **LOW}, 4: WHOLE}

PARITY = {**WHOLE, **LOW, **ACCUMULATION, **OVERFLOW, **VARIANTS}


def precision_of(name: str) -> str:
    return next((precision for precision in ("bf16", "fp16") if precision in name), "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("world", ON)
def test_zero_takes_the_steps_of_a_plain_loop(ranks: RunsRanks, dataset: str, world: int) -> None:
    for name, trained in train_all(ranks, dataset, ON[world], world=world, longest=240.0).items():
        print(name, check(trained, reference(dataset, ON[world][name]), "zero", precision_of(name)))


@pytest.mark.slow
def test_accumulation_of_uneven_micro_batches_equals_the_whole_batch(ranks: RunsRanks, dataset: str) -> None:
    for name, trained in train_all(ranks, dataset, ACCUMULATION, world=2, longest=240.0).items():
        print(name, check(trained, reference(dataset, ACCUMULATION[name]), "zero", precision_of(name)))


@pytest.mark.slow
def test_variants_take_the_same_steps(ranks: RunsRanks, dataset: str) -> None:
    """Recomputed, with parameters that do not train, from the meta device, unclipped, with DeepSpeed's own keys."""
    for name, trained in train_all(ranks, dataset, VARIANTS, world=2, longest=240.0).items():
        expected = reference(dataset, VARIANTS[name])
        print(name, check(trained, expected, "zero", precision_of(name)))
        for parameter in VARIANTS[name].frozen:  # in bf16 it computes, but checkpoints have all of it
            np.testing.assert_array_equal(trained.parameters[parameter], expected.parameters[parameter])


@pytest.mark.slow
def test_num_04_an_infinite_gradient_on_one_rank_skips_the_step_on_all(ranks: RunsRanks, dataset: str) -> None:
    """Parameters stay as they were, the schedule and the data move on, the loss scale is halved, and training goes on."""
    for name, trained in train_all(ranks, dataset, OVERFLOW, world=2, longest=240.0).items():
        check(trained, reference(dataset, OVERFLOW[name], skip=(3,)), "zero", "fp16")
        assert trained.skipped == 1
        assert math.isinf(trained.norms[2])
        assert trained.kept
        assert trained.loss_scale == 2.0**15


def test_deepspeed_keeps_quiet(ranks: Any, dataset: str) -> None:
    """Nothing of its own among the run's lines; the optimizer that it has for zero1 in bf16 would print its use of memory."""
    configurations = {
        stage: {"arguments": (f"--strategy={stage}", "--precision=bf16", "--steps=1", "--micro_batch=8")} for stage in STAGES
    }
    (outcome,) = ranks("parity", world=1, dataset=dataset, configurations=configurations)
    assert outcome.code == 0, outcome.log
    assert all(not result["error"] for result in outcome.result.values())
    lines = [line for line in outcome.log.splitlines() if not line.startswith((*STAGES, "step ", "Done "))]
    assert lines == []


def test_what_leans_on_deepspeeds_own_attributes_is_of_the_version_it_was_made_for() -> None:
    """`zero_parts`, `zero_gradients` and `zero_nvme` reach into it. Raise the pin only with the tests here passing."""
    pinned = re.search(r'"deepspeed==([\d.]+)"', (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())
    assert pinned
    assert importlib.metadata.version("deepspeed").partition("+")[0] == pinned[1] == "0.19.8"


# On one process


@pytest.fixture
def alone() -> Iterator[Ranks]:
    """One rank, in the test's own process."""
    yield Ranks(0, 1, 0, torch.device("cpu"), None, None)
    leave()


class Choosy(nn.Module):
    """Uses one of two parameters, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2, bias=False)
        self.second = nn.Linear(3, 2, bias=False)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def loss(self, use: tuple[str, ...]) -> Tensor:
        return sum((getattr(self, name)(torch.ones(3)) * self.frozen).sum() for name in use)  # type: ignore[return-value]


def settings_of(*arguments: str) -> TrainSettings:
    return settle(None, list(arguments))


def prepared(ranks: Ranks, *arguments: str, optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None) -> ZeRO:
    strategy = ZeRO(settings_of(*arguments), ranks)
    model = Choosy()
    strategy.prepare(model, optimizer(model) if optimizer else sgd(model))
    return strategy


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)


def weights_of(strategy: ZeRO) -> dict[str, Tensor]:
    return {part.name.removeprefix("model/"): part.local.clone() for part in strategy.model_parts()}


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_a_micro_batch_does_not_use(alone: Ranks, stage: str, precision: str, offload: str) -> None:
    """Each step is updated by its own gradients: none of the step before, and all of its own micro-batches'."""
    model = Choosy()
    arguments = (f"--strategy={stage}", f"--precision={precision}", f"--sharding.offload_optimizer={offload}")
    strategy = ZeRO(settings_of(*arguments), alone)
    optimizer = sgd(model)
    strategy.prepare(model, optimizer)
    both, first, second = ("first", "second"), ("first",), ("second",)
    for micro_batches in ([both], [first], [second], [both, first], [second, first], [first, first], [both, both]):
        before = weights_of(strategy)
        for number, use in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            strategy.backward(strategy.call("loss", (use,), {}, last=last), last=last)
        norm = strategy.update(optimizer, clip_norm=math.inf)
        after = weights_of(strategy)
        used = {name: sum(name in use for use in micro_batches) for name in both}
        for name, times in used.items():  # the gradient of every element is 1
            torch.testing.assert_close(before[f"{name}.weight"] - after[f"{name}.weight"], torch.full((2, 3), float(times)))
        assert float(norm) == pytest.approx(math.sqrt(sum(6 * times**2 for times in used.values()))), micro_batches


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_what_was_rehearsed_is_forgotten(alone: Ranks, stage: str, precision: str, offload: str) -> None:
    """For micro_batch: auto, which measures passes before training."""
    model = Choosy()
    arguments = (f"--strategy={stage}", f"--precision={precision}", f"--sharding.offload_optimizer={offload}")
    strategy = ZeRO(settings_of(*arguments), alone)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0, momentum=0.5)
    strategy.prepare(model, optimizer)
    assert sum(tensor.numel() for tensor in strategy.without_state(optimizer)) == 12
    before = weights_of(strategy)
    for _ in range(2):
        strategy.rehearse(("first", "second"))
    strategy.forget_gradients()
    for last in (False, True):
        strategy.backward(strategy.call("loss", (("first",),), {}, last=last), last=last)
    assert float(strategy.update(optimizer, clip_norm=math.inf)) == pytest.approx(math.sqrt(6 * 2**2))
    after = weights_of(strategy)
    torch.testing.assert_close(before["first.weight"] - after["first.weight"], torch.full((2, 3), 2.0))
    torch.testing.assert_close(before["second.weight"], after["second.weight"])
    assert not strategy.without_state(optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_what_does_not_fit_in_low_precision_is_kept_in_the_master_weights(alone: Ranks, stage: str) -> None:
    torch.manual_seed(0)
    model = Choosy()
    original = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    strategy = ZeRO(settings_of(f"--strategy={stage}", "--precision=bf16"), alone)
    strategy.prepare(model, sgd(model))
    assert model.first.weight.dtype == torch.bfloat16
    found = weights_of(strategy)
    assert found.keys() == original.keys()
    for name, weight in original.items():
        assert not torch.equal(weight, weight.bfloat16().float()) or name == "frozen"
        torch.testing.assert_close(found[name], weight, rtol=0, atol=0)


@pytest.mark.parametrize("stage", STAGES)
def test_restored_weights_are_those_that_compute(alone: Ranks, stage: str) -> None:
    strategy = prepared(alone, f"--strategy={stage}", "--precision=bf16")
    for part in strategy.model_parts():
        part.local.fill_(0.5)
    strategy.restored()
    with torch.no_grad():
        loss = strategy.call("loss", (("first",),), {}, last=True)
    assert float(loss) == 0.5 * 2 * 3 * 0.5  # frozen x outputs x inputs x weight


@pytest.mark.parametrize("stage", STAGES)
def test_state_that_a_checkpoint_lacks_of_a_parameter_without_gradients_is_zero(alone: Ranks, stage: str) -> None:
    """ddp and fsdp2 have no state of a parameter that was never used."""
    model = Choosy()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    strategy = ZeRO(settings_of(f"--strategy={stage}"), alone)
    strategy.prepare(model, optimizer)
    wanted = {f"optimizer/first.weight/{key}": torch.empty(2, 3, device="meta") for key in ("exp_avg", "exp_avg_sq")}
    wanted["optimizer/first.weight/step"] = torch.empty((), device="meta")
    targets = strategy.optimizer_targets(optimizer, wanted)
    assert {part.name for part in targets} == set(wanted)
    for part in targets:
        part.local.fill_(1.0)
    found = {part.name: part.local for part in strategy.optimizer_parts(optimizer)}
    assert found["optimizer/first.weight/exp_avg"].eq(1).all()
    assert found["optimizer/second.weight/exp_avg"].eq(0).all()


def test_a_gradient_that_is_not_finite_is_told_of_ever_after(alone: Ranks) -> None:
    """Without a loss scale nothing is skipped: DeepSpeed leaves the step out, and the run must stop at its next check."""
    for stage in STAGES:
        model = Choosy()
        strategy = ZeRO(settings_of(f"--strategy={stage}"), alone)
        optimizer = sgd(model)
        strategy.prepare(model, optimizer)
        for factor in (math.inf, 1.0):
            strategy.backward(strategy.call("loss", (("first", "second"),), {}, last=True) * factor, last=True)
            assert not math.isfinite(strategy.update(optimizer, clip_norm=1.0))
        assert strategy.skipped == 0


def test_deepspeed_leaves_no_linear_layer_in_torch(alone: Ranks) -> None:
    linear = nn.functional.linear
    strategy = prepared(alone, "--strategy=zero3")
    assert nn.functional.linear is linear
    strategy.call("loss", (("first",),), {}, last=True)
    assert nn.functional.linear is linear


def test_deepspeed_communicates_in_the_runs_own_group(alone: Ranks) -> None:
    strategy = prepared(alone, "--strategy=zero2")
    assert strategy.engine.data_parallel_group is dist.group.WORLD


# What is refused


def test_a_missing_deepspeed_is_an_error_that_says_what_to_install(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=re.escape('pip install "traincluster[deepspeed]"')):
        prepared(alone, "--strategy=zero1")


def test_fp16_is_refused_where_the_cpu_has_none(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = pytest.importorskip("deepspeed.accelerator").get_accelerator()
    monkeypatch.setattr(accelerator, "is_fp16_supported", lambda: False)
    with pytest.raises(ConfigError, match='precision is "fp16", which DeepSpeed does not have on this CPU'):
        prepared(alone, "--strategy=zero2", "--precision=fp16")


class Whole(torch.optim.Optimizer):
    """Claims to look at whole matrices."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})


class OwnAdamW(torch.optim.AdamW):
    """AdamW all the same."""


def test_optimizers_that_look_at_whole_matrices_are_refused(alone: Ranks) -> None:
    def trained(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.requires_grad]

    with pytest.raises(ConfigError, match=r"The optimizer is Whole, but zero2 hands the optimizer stretches .* Allowed: .*AdamW"):
        prepared(alone, "--strategy=zero2", optimizer=lambda model: Whole(trained(model)))
    prepared(alone, "--strategy=zero2", optimizer=lambda model: OwnAdamW(trained(model)))


class Counting(torch.optim.SGD):
    """Counts its steps in a number of Python's."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


@pytest.mark.parametrize("stage", STAGES)
def test_state_that_is_no_tensor_is_refused_at_the_first_step(alone: Ranks, stage: str) -> None:
    model = Choosy()
    optimizer = Counting([p for p in model.parameters() if p.requires_grad], lr=1.0)
    strategy = ZeRO(settings_of(f"--strategy={stage}"), alone)
    strategy.prepare(model, optimizer)
    strategy.backward(strategy.call("loss", (("first", "second"),), {}, last=True), last=True)
    with pytest.raises(ConfigError, match=r"Counting keeps state that is no tensor: count\. .* Make them tensors"):
        strategy.update(optimizer, clip_norm=1.0)


def test_a_group_of_frozen_parameters_is_refused(alone: Ranks) -> None:
    def groups(model: Any) -> torch.optim.Optimizer:
        trained = {"params": [model.first.weight, model.second.weight]}
        return torch.optim.SGD([trained, {"params": [model.frozen]}], lr=1.0)

    with pytest.raises(ConfigError, match="No parameter of the optimizer's group 1 requires gradients"):
        prepared(alone, "--strategy=zero1", optimizer=groups)


def test_what_a_disk_needs_is_told_at_once(alone: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    builder = pytest.importorskip("deepspeed.ops.op_builder").AsyncIOBuilder
    monkeypatch.setattr(builder, "is_compatible", lambda self: False)
    monkeypatch.setenv("PATH", "")
    missing = str(tmp_path / "missing")
    with pytest.raises(ConfigError) as error:
        prepared(alone, "--strategy=zero3", "--sharding.offload_optimizer=nvme", f"--sharding.nvme_path={missing}")
    libaio, tools, folder = error.value.problems
    assert "Install libaio-dev (Debian, Ubuntu) or libaio-devel" in libaio
    assert "c++ and ninja are not on PATH. Install g++ and ninja." in tools
    assert f"sharding.nvme_path is {missing!r}, which is no folder" in folder


# The engine's configuration


def test_the_settings_win_over_a_deepspeed_file_and_its_own_keys_are_handed_on() -> None:
    document = {
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 12345, "overlap_comm": False},
        "wall_clock_breakdown": False,
    }
    settings = settings_of(f"--deepspeed={json.dumps(document)}", "--precision=bf16", "--sharding.offload_optimizer=cpu")
    configuration = engine_configuration(settings, nn.Linear(2, 2))
    assert configuration["gradient_clipping"] == 0.5
    assert configuration["zero_optimization"] == {
        "stage": 2,
        "reduce_bucket_size": 12345,
        "overlap_comm": False,
        "offload_optimizer": {"device": "cpu"},
    }
    assert configuration["bf16"]["enabled"]
    assert configuration["gradient_accumulation_steps"] == 1


def test_ux_02_auto_sizes_follow_from_the_models_width() -> None:
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    settings = settings_of(f"--deepspeed={json.dumps({'zero_optimization': zero})}")
    wide = nn.Linear(2, 2)
    wide.config = types.SimpleNamespace(hidden_size=4096)
    found = engine_configuration(settings, wide)["zero_optimization"]
    assert (found["reduce_bucket_size"], found["stage3_prefetch_bucket_size"]) == (16777216, 15099494)
    with pytest.raises(ConfigError, match=r"deepspeed\.zero_optimization\.reduce_bucket_size is 'auto'"):
        engine_configuration(settings, nn.Linear(2, 2))


@pytest.mark.parametrize(("kind", "width"), [("LlamaConfig", "hidden_size"), ("GPT2Config", "n_embd")])
def test_ux_02_auto_sizes_follow_from_the_width_of_a_model_that_is_fine_tuned(kind: str, width: str) -> None:
    transformers = pytest.importorskip("transformers")
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    settings = settings_of(f"--deepspeed={json.dumps({'zero_optimization': zero})}")
    layers = {"LlamaConfig": {"num_hidden_layers": 1, "intermediate_size": 8}, "GPT2Config": {"n_layer": 1}}[kind]
    config = getattr(transformers, kind)(vocab_size=9, **{width: 96}, **layers)
    with torch.device("meta"):
        model = HuggingFaceModel(transformers.AutoModelForCausalLM.from_config(config), "causal")
    found = engine_configuration(settings, model)["zero_optimization"]
    assert (found["reduce_bucket_size"], found["stage3_param_persistence_threshold"]) == (96 * 96, 960)


def test_buffers_follow_from_the_size_of_the_model() -> None:
    """A model of 100 million parameters would otherwise never be let go by stage 3, and gradients take 2 GB of buckets."""
    layers = nn.ModuleList(nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 20, bias=False)) for _ in range(5))
    found = engine_configuration(settings_of("--strategy=zero3"), layers)["zero_optimization"]
    assert found == {
        "stage": 3,
        "reduce_bucket_size": 1500,  # all of the model
        "stage3_prefetch_bucket_size": 300,
        "stage3_max_live_parameters": 900,
        "stage3_max_reuse_distance": 300,
    }
    with torch.device("meta"):
        large = nn.ModuleList(nn.Sequential(nn.Linear(2**16, 2**16)) for _ in range(2))
    found = engine_configuration(settings_of("--strategy=zero2"), large)["zero_optimization"]
    assert found == {"stage": 2, "reduce_bucket_size": 2**24}


# Stretches as boxes


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_make_up_a_stretch_in_order(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    pieces = [whole[tuple(slice(s, s + n) for s, n in zip(*box, strict=True))] for box in boxes(tuple(shape), start, stop)]
    assert torch.cat([piece.reshape(-1) for piece in pieces] or [torch.empty(0)]).tolist() == list(range(start, stop))
    assert len(pieces) <= max(1, 2 * len(shape) - 1)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(1, 5))
def test_the_boxes_of_all_ranks_cover_a_tensor(shape: list[int], ranks: int) -> None:
    elements = math.prod(shape)
    size = -(-elements // ranks)
    bounds = [(min(rank * size, elements), min((rank + 1) * size, elements)) for rank in range(ranks)]
    found = [
        tuple((s, s + n) for s, n in zip(*box, strict=True)) for first, last in bounds for box in boxes(tuple(shape), first, last)
    ]
    assert cover(found, tuple(shape))
