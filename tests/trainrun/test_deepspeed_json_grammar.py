"""The grammar of DeepSpeed files: against DeepSpeed's own classes, and against files that nobody would write."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from trainrun.config import ConfigError
from trainrun.deepspeed_json import BatchSizes, engine_tuning, remarks, translate
from trainrun.deepspeed_json.section import AUTO
from trainrun.deepspeed_json.zero import BY_WIDTH, FLAGS, SIZES
from trainrun.settings import TrainSettings
from trainrun.settings.layers import train_settings
from trainrun.spec import JobSpec, from_mapping, to_mapping

SOMETHING = st.none() | st.booleans() | st.integers(-3, 10**9) | st.floats() | st.sampled_from(["auto", "cpu", "x", ""])


def sizes():
    return st.fixed_dictionaries({}, optional={name: st.integers(least, 10**9) | st.just(1e6) for name, least in SIZES.items()})


def by_width():
    return st.fixed_dictionaries({}, optional={name: st.just(AUTO) for name in BY_WIDTH})


def flags():
    return st.fixed_dictionaries({}, optional={name: st.booleans() for name in FLAGS})


def offload(*sizes_of_it):
    optional = {"pin_memory": st.booleans(), **{name: st.integers(1, 10**6) for name in sizes_of_it}}
    return st.fixed_dictionaries({"device": st.just("cpu")}, optional=optional)


@st.composite
def zero_blocks(draw):
    """Blocks that are all right."""
    block = {"stage": draw(st.integers(1, 3)), **draw(sizes()), **draw(by_width()), **draw(flags())}
    if draw(st.booleans()):
        block["offload_optimizer"] = draw(offload("buffer_count"))
    if block["stage"] == 3 and draw(st.booleans()):
        block["offload_param"] = draw(offload("buffer_count", "buffer_size", "max_in_cpu"))
    return block


@pytest.fixture(scope="module")
def deepspeed_zero():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return pytest.importorskip("deepspeed.runtime.zero.config")


def test_every_name_of_deepspeeds_own_classes_is_understood(deepspeed_zero):
    config = deepspeed_zero.DeepSpeedZeroConfig
    for name, field in config.model_fields.items():
        for spelling in {name, field.alias or name}:
            found = translate({"zero_optimization": {"stage": 3, spelling: None}}).problems
            assert not any("no key of DeepSpeed" in problem for problem in found), spelling
    for block in ("offload_optimizer", "offload_param"):
        (kind,) = [each for each in config.model_fields[block].annotation.__args__ if each is not type(None)]
        for name in kind.model_fields:
            content = {"stage": 3, block: {"device": "cpu", name: None}} if name != "device" else {}
            assert not any("no key" in problem for problem in translate({"zero_optimization": content}).problems), name


def test_what_deepspeed_has_removed_is_refused_only_where_it_is_switched_on():
    removed = pytest.importorskip("deepspeed.runtime.config")._REMOVED_TOP_LEVEL_CONFIG_KEYS
    for name in removed:
        assert translate({name: {"enabled": False}}).problems == [], "DeepSpeed itself refuses even this"
        assert translate({name: False}).problems == []
        (problem,) = translate({name: {"enabled": True}}).problems
        assert problem.startswith(f"deepspeed.{name} is ")


@hypothesis_settings(max_examples=60, deadline=None)
@given(block=zero_blocks(), hidden=st.integers(1, 20000))
def test_ux_06_what_is_accepted_deepspeed_accepts_and_reads_alike(deepspeed_zero, block, hidden):
    document = {"zero_optimization": block}
    settings = train_settings({"deepspeed": document}, source="the test")
    assert settings.strategy == f"zero{block['stage']}"
    tuning = engine_tuning(document, stage=block["stage"], hidden_size=hidden).get("zero_optimization", {})
    assert "auto" not in json.dumps(tuning)
    read = deepspeed_zero.DeepSpeedZeroConfig(strict=True, stage=block["stage"], **tuning)
    for name, value in block.items():
        field = name.removeprefix("stage3_") if name.removeprefix("stage3_") in type(read).model_fields else name
        if value == AUTO:
            assert (
                getattr(read, field)
                == {
                    "reduce_bucket_size": hidden * hidden,
                    "prefetch_bucket_size": int(0.9 * hidden * hidden),
                    "param_persistence_threshold": 10 * hidden,
                }[field]
            )
        elif not isinstance(value, dict):
            assert getattr(read, field) == value


DOCUMENTS = st.recursive(
    SOMETHING,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                [
                    *(
                        "zero_optimization",
                        "stage",
                        "offload_optimizer",
                        "offload_param",
                        "device",
                        "fp16",
                        "bf16",
                        "enabled",
                        "optimizer",
                    ),
                    *(
                        "type",
                        "params",
                        "lr",
                        "betas",
                        "scheduler",
                        "warmup_num_steps",
                        "train_batch_size",
                        "aio",
                        "reduce_bucket_size",
                    ),
                    *(
                        "train_micro_batch_size_per_gpu",
                        "gradient_accumulation_steps",
                        "gradient_clipping",
                        "leaf_module",
                        "unknown",
                    ),
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@hypothesis_settings(max_examples=300, deadline=None)
@given(document=DOCUMENTS.filter(lambda value: isinstance(value, dict)), ranks=st.none() | st.integers(1, 40))
def test_any_json_is_read_or_refused_in_sentences_that_name_a_key(document, ranks):
    try:
        settings = train_settings({"deepspeed": document}, source="the test", ranks=ranks)
    except ConfigError as error:
        assert all(problem.endswith(".") for problem in error.problems)
        assert all("deepspeed." in problem or "nvme" in problem for problem in error.problems)
    else:
        assert from_mapping(TrainSettings, to_mapping(settings)) == settings
        assert all(isinstance(remark, str) for remark in remarks(settings))
        JobSpec(entry_point="train.py", configuration={"deepspeed": document})


OPTIONAL = st.none() | st.integers(1, 64)


@given(train=OPTIONAL, micro=OPTIONAL, accumulation=OPTIONAL, ranks=st.integers(1, 16))
def test_ux_03_sizes_hold_deepspeeds_identity_or_are_refused_with_the_numbers(train, micro, accumulation, ranks):
    given_sizes = BatchSizes(train, micro, accumulation)
    possible = any(
        (train or t) == (micro or m) * (accumulation or a) * ranks
        for t in {train or (micro or 1) * (accumulation or 1) * ranks}
        for m in ([micro] if micro else range(1, 65))
        for a in ([accumulation] if accumulation else range(1, 65))
    )
    try:
        sizes = given_sizes.with_ranks(ranks)
    except ConfigError as error:
        assert not possible, error
        assert f"{train} != " in str(error)
        assert f"* {ranks}." in str(error)
        return
    for asked, got in ((train, sizes.train), (micro, sizes.micro), (accumulation, sizes.accumulation)):
        assert asked in (None, got)
    if train is not None or micro is not None:
        assert sizes.train == sizes.micro * sizes.accumulation * ranks
