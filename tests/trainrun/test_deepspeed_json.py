"""DeepSpeed files in the shapes that people have, read into settings."""

import json
from pathlib import Path

import pytest

from trainrun.config import ConfigError, to_mapping
from trainrun.deepspeed_json import engine_tuning, remarks
from trainrun.settings.layers import train_settings
from trainrun.settle import settle

TRAINER_ZERO3 = {
    "bf16": {"enabled": "auto"},
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""As Hugging Face's Trainer and accelerate take it."""

ZERO3_OFFLOAD = {
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "bf16": {"enabled": True},
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
"""As fine-tuning suites have it, with a client's optimizer."""

ZERO2_OFFLOAD = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "reduce_bucket_size": 5e8,
        "round_robin_gradients": True,
    },
}

BERT_LAMB = {
    "train_batch_size": 65536,
    "train_micro_batch_size_per_gpu": 64,
    "steps_per_print": 1000,
    "prescale_gradients": False,
    "optimizer": {"type": "Lamb", "params": {"lr": 11e-3, "weight_decay": 0.01, "bias_correction": False, "max_coeff": 0.3}},
    "gradient_clipping": 1.0,
    "wall_clock_breakdown": False,
    "fp16": {"enabled": True, "loss_scale": 0},
    "sparse_attention": {"mode": "fixed", "block": 16},
}

SQUAD = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 3,
    "steps_per_print": 10,
    "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "weight_decay": 0.0, "bias_correction": True}},
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True},
}


def read(document, *, ranks=8, **given):
    return train_settings({**given, "deepspeed": document}, source="train.yaml", origins={"deepspeed": "ds.json"}, ranks=ranks)


def problems(document, **keywords):
    with pytest.raises(ConfigError) as caught:
        read(document, **keywords)
    return list(caught.value.problems)


def autos(value):
    """Whether "auto" is left anywhere."""
    if isinstance(value, dict):
        return any(map(autos, value.values()))
    return value == "auto"


# whole files


@pytest.mark.parametrize(
    "document", [TRAINER_ZERO3, ZERO3_OFFLOAD, ZERO2_OFFLOAD], ids=["trainer", "zero3-offload", "zero2-offload"]
)
def test_ux_02_no_auto_is_left_of_any_file(document):
    settings = read(document, model={"preset": "llama3-8b"}, precision="bf16", optimizer={"learning_rate": 2e-5})
    stage = int(settings.strategy[-1])
    tuning = engine_tuning(settings.deepspeed, stage=stage, hidden_size=settings.model.width)
    assert not autos(tuning)
    ours = {name: value for name, value in to_mapping(settings).items() if name != "deepspeed"}
    assert not autos(ours)


def test_ux_02_sizes_follow_from_llamas_hidden_size():
    settings = read(TRAINER_ZERO3, model={"preset": "llama3-8b"})
    zero = engine_tuning(settings.deepspeed, stage=3, hidden_size=settings.model.width)["zero_optimization"]
    assert zero["reduce_bucket_size"] == 16_777_216
    assert zero["stage3_prefetch_bucket_size"] == 15_099_494
    assert zero["stage3_param_persistence_threshold"] == 40_960
    assert zero["sub_group_size"] == 10**9
    assert all(type(value) in (int, bool) for value in zero.values())


def test_ux_02_auto_without_a_hidden_size_is_refused_by_path():
    with pytest.raises(ConfigError) as caught:
        engine_tuning(TRAINER_ZERO3, stage=3, hidden_size=None)
    assert len(caught.value.problems) == 3
    assert "deepspeed.zero_optimization.reduce_bucket_size is 'auto'" in str(caught.value)
    assert "Give a number." in str(caught.value)


def test_ux_02_sizes_of_stage_3_need_no_hidden_size_in_stage_2():
    document = {"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": "auto"}}
    assert engine_tuning(document, stage=2, hidden_size=None) == {}


def test_ux_02_auto_where_nothing_says_what_it_is_is_refused_by_path():
    (problem,) = problems({"zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"}})
    assert "deepspeed.zero_optimization.allgather_bucket_size is 'auto'" in problem
    assert "without the key DeepSpeed's default holds" in problem


def test_ux_02_auto_takes_the_users_settings():
    own = {"learning_rate": 2e-5, "warmup_steps": 7, "beta2": 0.98, "weight_decay": 0.01, "clip_norm": 0.5}
    settings = read(TRAINER_ZERO3, optimizer=own, precision="bf16", steps=500, batch_tokens=4096, micro_batch=2)
    for name, value in own.items():
        assert getattr(settings.optimizer, name) == value
    assert (settings.strategy, settings.precision, settings.steps) == ("zero3", "bf16", 500)
    assert (settings.optimizer.schedule, settings.optimizer.final_fraction) == ("linear", 0.0)
    assert (settings.batch_tokens, settings.micro_batch) == (4096, 2)


def test_what_auto_became_is_told_in_one_line():
    settings = read(TRAINER_ZERO3, batch_tokens=4096, optimizer={"learning_rate": 2e-5})
    told = [remark for remark in remarks(settings) if "auto" in remark]
    assert len(told) == 1
    assert told[0].startswith('"auto" in the DeepSpeed file became: precision fp32 (--precision=bf16 or fp16 decides), ')
    for value in ("optimizer.learning_rate 2e-05", "optimizer.beta2 0.95", "optimizer.weight_decay 0.1", "steps 1000"):
        assert f", {value}, " in told[0]
    assert told[0].endswith(", batch_tokens 4096, micro_batch 8.")
    assert told[0].count("learning_rate") == 1, "of lr and of warmup_max_lr"
    assert "precision bf16, " in remarks(read(TRAINER_ZERO3, precision="bf16"))[0]
    assert not any("auto" in remark for remark in remarks(read(SQUAD)))


@pytest.mark.parametrize(("given", "wanted"), [({}, "full"), ({"activation_checkpointing": "selective"}, "selective")])
def test_activations_are_recomputed_in_full_unless_the_settings_say_otherwise(given, wanted):
    settings = read({"activation_checkpointing": {"partition_activations": True}}, **given)
    assert settings.activation_checkpointing == wanted
    assert (
        "deepspeed.activation_checkpointing.partition_activations: activation_checkpointing says what is recomputed ('full' "
        "unless you set it), and what is kept stays whole on its device."
    ) in remarks(settings)


def test_clipping_and_a_schedule_that_deepspeed_would_not_have_are_told():
    bare = {"zero_optimization": {"stage": 2}}
    clipping, schedule = remarks(read(bare))
    assert clipping.startswith("deepspeed.gradient_clipping is not set, without which DeepSpeed does not clip: gradients are ")
    assert "clipped at 1 here" in clipping
    assert "DeepSpeed keeps the learning rate: here it has a warm-up of 20 steps and the schedule 'cosine'" in schedule
    assert remarks(read(bare, optimizer={"clip_norm": 0, "schedule": "constant", "warmup_steps": 0})) == []
    (warmup,) = remarks(read({**bare, "gradient_clipping": 1.0}, optimizer={"schedule": "constant", "warmup_steps": 1}))
    assert "a warm-up of 1 step and the schedule 'constant'" in warmup
    scheduler = {"type": "WarmupLR", "params": {"warmup_type": "linear"}}
    assert remarks(read({**bare, "gradient_clipping": 0.5, "scheduler": scheduler})) == []


def test_a_squad_file_becomes_the_settings_that_it_means():
    settings = read(SQUAD, sequence_length=384)
    assert (settings.strategy, settings.precision) == ("ddp", "fp16"), "without zero_optimization every rank has a replica"
    assert (settings.batch_tokens, settings.micro_batch) == (24 * 384, 3)
    optimizer = settings.optimizer
    assert (optimizer.name, optimizer.learning_rate, optimizer.weight_decay) == ("adamw", 3e-5, 0.0)
    assert (optimizer.beta1, optimizer.beta2, optimizer.clip_norm) == (0.9, 0.999, 1.0), "DeepSpeed's defaults, not ours"


# UX-03: the batch


def test_ux_03_bert_at_world_64_accumulates_16_times():
    (problem, sparse) = problems(BERT_LAMB, ranks=64)
    assert "deepspeed.optimizer.type is 'Lamb'" in problem, "the batch is fine, only the optimizer is not"
    assert "deepspeed.sparse_attention" in sparse
    without = {name: value for name, value in BERT_LAMB.items() if name not in ("optimizer", "sparse_attention")}
    settings = read(without, ranks=64, sequence_length=128)
    assert settings.batch_tokens // (settings.sequence_length * settings.micro_batch * 64) == 16


def test_ux_03_bert_at_world_48_shows_the_identity_beside_the_optimizer():
    (sizes, *rest) = sorted(problems(BERT_LAMB, ranks=48), key=lambda problem: "65536" not in problem)
    assert "65536 != 64 * GA * 48" in sizes
    assert "These sizes go with 32 or 64 ranks" in sizes
    assert any("Lamb" in problem for problem in rest)


def test_ux_03_squad_on_8_ranks_accumulates_once_and_on_16_is_an_error():
    settings = read(SQUAD, ranks=8)
    assert settings.batch_tokens // (settings.sequence_length * settings.micro_batch * 8) == 1
    (problem,) = problems(SQUAD, ranks=16)
    assert "24 != 3 * GA * 16" in problem


def test_ux_03_the_world_is_that_of_the_launcher_and_checked_before_any_group_is_made(tmp_path, monkeypatch):
    (tmp_path / "ds.json").write_text(json.dumps(SQUAD))
    monkeypatch.setenv("WORLD_SIZE", "16")
    with pytest.raises(ConfigError, match=r"24 != 3 \* GA \* 16"):
        settle(None, [f"--deepspeed={tmp_path / 'ds.json'}"])
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert settle(None, [f"--deepspeed={tmp_path / 'ds.json'}"]).micro_batch == 3


def test_ux_03_without_the_world_the_sizes_are_taken_and_not_judged():
    assert read(SQUAD, ranks=None).micro_batch == 3


@pytest.mark.parametrize(
    ("sizes", "given", "train", "micro"),
    [
        ({"train_batch_size": 32}, {}, 32, 4),  # alone: one accumulation
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, {}, 32, 2),
        ({"train_micro_batch_size_per_gpu": 3}, {}, 24, 3),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}, {}, 96, 3),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}, {}, 64, 4),
        ({"gradient_accumulation_steps": 4}, {"micro_batch": 2}, 64, 2),
        ({"gradient_accumulation_steps": 2}, {"batch_tokens": 32 * 256}, 32, 2),
        ({"gradient_accumulation_steps": 2}, {}, 8 * 2 * 8, 8),  # the micro-batch is our default
        ({"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": "auto"}, {}, 8 * 8, 8),
        ({"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": "auto"}, {"micro_batch": 3}, 3 * 8, 3),
        ({"train_batch_size": 32, "gradient_accumulation_steps": "auto"}, {}, 32, 8),  # both are ours to choose
    ],
)
def test_two_sizes_give_the_third(sizes, given, train, micro):
    settings = read({"zero_optimization": {"stage": 1}, **sizes}, ranks=8, **given)
    assert (settings.batch_tokens // 256, settings.micro_batch) == (train, micro)


@pytest.mark.parametrize("ranks", [None, 8])
def test_accumulation_alone_does_not_go_with_a_micro_batch_that_is_measured(ranks):
    (problem,) = problems({"gradient_accumulation_steps": 2}, ranks=ranks, micro_batch="auto")
    assert "deepspeed.gradient_accumulation_steps is 2, but micro_batch is 'auto' and nothing gives the size of a step" in problem
    assert "Give micro_batch as a number or batch_tokens, or remove gradient_accumulation_steps." in problem


def test_accumulation_of_examples_takes_the_default_micro_batch():
    document = {"gradient_accumulation_steps": 2, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    settings = read(document, ranks=3, finetune={"model": "models/llama"})
    assert (settings.batch_examples, settings.micro_batch) == (8 * 2 * 3, 8)


def test_all_three_sizes_are_checked():
    document = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    (problem,) = problems(document, ranks=8)
    assert "64 != 4 * 3 * 8" in problem
    assert "no number of ranks; for 8 ranks make train_batch_size 96." in problem
    (problem,) = problems({**document, "train_batch_size": 24}, ranks=1)
    assert "These sizes go with 2 ranks; for 1 rank make train_batch_size 12." in problem
    (problem,) = problems({**document, "train_batch_size": 12}, ranks=2)
    assert "These sizes go with 1 rank; for 2 ranks make train_batch_size 24." in problem
    (problem,) = problems({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 5}, ranks=1)
    assert problem.endswith("for 1 rank make train_batch_size a multiple of 5.")
    (problem,) = problems({"train_batch_size": 24}, ranks=1, micro_batch=5)
    assert problem.endswith("for 1 rank make train_batch_size a multiple of 5.")


def test_a_batch_that_the_settings_give_otherwise_is_shown_in_sequences_and_tokens():
    (problem,) = problems(SQUAD, batch_tokens=48 * 256)
    assert "deepspeed.train_batch_size (24 sequences of 256 tokens) in ds.json makes batch_tokens 6144" in problem
    assert "batch_tokens is 12288 in train.yaml" in problem


@pytest.mark.parametrize(
    "given",
    [
        {"batch_tokens": 1024.0, "sequence_length": 32},
        {"batch_tokens": 1024, "sequence_length": 3.2e1},
        {"batch_examples": 32.0},
        {"micro_batch": 4.0},
    ],
)
def test_a_number_that_is_whole_but_written_otherwise_contradicts_like_any_other(given):
    (problem,) = problems(SQUAD, **given)
    assert f"but {next(iter(given))} is {next(iter(given.values()))} in train.yaml" in problem


def test_a_number_that_is_whole_but_written_otherwise_is_the_same():
    assert read(SQUAD, batch_examples=24.0).batch_examples == 24
    assert read(SQUAD, sequence_length=3.2e1, batch_tokens=7.68e2, micro_batch=3.0).batch_tokens == 24 * 32
    assert read(SQUAD, sequence_length=3.2e1).batch_tokens == 24 * 32


@pytest.mark.parametrize("length", [float("nan"), float("inf"), 32.5, True, -32, "32"])
def test_a_length_that_is_none_is_the_settings_to_refuse(length):
    assert any("sequence_length" in problem for problem in problems(SQUAD, sequence_length=length))


def test_a_step_of_examples_takes_the_batch_as_it_is():
    assert read(SQUAD, batch_examples=24).batch_examples == 24
    fine_tuned = {"finetune": {"model": "models/llama"}}
    assert read(SQUAD, **fine_tuned).batch_examples == 24, "fine-tuning is of examples"
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    assert read(sizes, ranks=3, **fine_tuned).batch_examples == 24
    assert read(sizes, **fine_tuned, batch_tokens=64 * 256).batch_examples == 0, "who says tokens means them"
    automatic = {"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}
    assert read(automatic, **fine_tuned).batch_examples == 0, "nothing says how many"
    assert read(automatic, **fine_tuned, batch_examples=8).batch_examples == 8
    (problem,) = problems(SQUAD, batch_examples=48)
    assert "deepspeed.train_batch_size in ds.json makes batch_examples 24, but batch_examples is 48" in problem
    (problem,) = problems({"train_micro_batch_size_per_gpu": 5}, batch_examples=48)
    assert "48 != 5 * GA * 8" in problem


# UX-05: offload with a client's optimizer


def test_ux_05_offload_with_a_clients_optimizer_is_accepted():
    settings = read(ZERO3_OFFLOAD)
    assert (settings.sharding.offload_optimizer, settings.sharding.offload_parameters) == ("cpu", "cpu")
    zero = engine_tuning(settings.deepspeed, stage=3, hidden_size=64)["zero_optimization"]
    assert zero["offload_param"] == {"pin_memory": True}, "where to is trainrun's setting; how is DeepSpeed's"


def test_ux_05_without_the_switch_the_update_is_on_the_cpu_all_the_same():
    settings = read(ZERO2_OFFLOAD)
    assert (settings.strategy, settings.sharding.offload_optimizer) == ("zero2", "cpu")
    assert "zero_force" not in " ".join(remarks(settings))
    assert "torch's fused AdamW" in remarks(read({**ZERO2_OFFLOAD, "zero_force_ds_cpu_optimizer": True}))[1]


def test_offload_to_disk_names_its_folder():
    offload = {"device": "nvme", "nvme_path": "/local", "buffer_count": 5}
    settings = read({"zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload}})
    sharding = settings.sharding
    assert (sharding.offload_optimizer, sharding.offload_parameters, sharding.nvme_path) == ("nvme", "nvme", "/local")


def test_a_folder_that_is_not_used_is_left_alone():
    document = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "nvme_path": "/local"}}}
    assert read(document).sharding.nvme_path == ""


def test_two_folders_for_one_disk_are_a_contradiction():
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
        "offload_param": {"device": "nvme", "nvme_path": "/b"},
    }
    (problem,) = problems({"zero_optimization": zero})
    assert "offload_optimizer.nvme_path and deepspeed.zero_optimization.offload_param.nvme_path disagree" in problem


@pytest.mark.parametrize(
    ("zero", "wanted"),
    [
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "too low (2). Allowed with it: 3."),
        ({"offload_optimizer": {"device": "cpu"}}, "too low (0). Allowed with it: 1, 2 or 3."),
        ({"stage": 1, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}, "is the old spelling of"),
    ],
)
def test_offload_that_the_stage_does_not_have_is_refused(zero, wanted):
    (problem,) = problems({"zero_optimization": zero})
    assert wanted in problem


# UX-06: sizes


@pytest.mark.parametrize("value", [0, -5, 9437184.6, True, "5e8", float("inf"), [1]])
def test_ux_06_a_bucket_of_nothing_or_of_a_part_is_refused_with_its_key(value):
    (problem,) = problems({"zero_optimization": {"stage": 2, "reduce_bucket_size": value}})
    assert problem.startswith("ds.json: deepspeed.zero_optimization.reduce_bucket_size is ")
    assert "Allowed: a whole number, 1 or more, or 'auto'" in problem


@pytest.mark.parametrize("name", ["allgather_bucket_size", "sub_group_size"])
def test_ux_06_sizes_that_deepspeed_divides_by_are_not_0_either(name):
    (problem,) = problems({"zero_optimization": {"stage": 3, name: 0}})
    assert f"zero_optimization.{name} is 0" in problem


def test_ux_06_5e8_is_a_whole_number_and_0_prefetches_nothing():
    document = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": 0}}
    zero = engine_tuning(read(document).deepspeed, stage=3, hidden_size=None)["zero_optimization"]
    assert zero == {"reduce_bucket_size": 500_000_000, "stage3_prefetch_bucket_size": 0}
    assert type(zero["reduce_bucket_size"]) is int


# optimizer and schedule


@pytest.mark.parametrize(
    ("scheduler", "schedule", "steps", "warmup", "final"),
    [
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, "constant", 1000, 5, 0.1),
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": 90, "warmup_num_steps": 9}}, "linear", 90, 9, 0.0),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": 90, "cos_min_ratio": 0.2}}, "cosine", 90, 1000, 0.2),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}, "cosine", 1000, 1000, 1e-4),
    ],
)
def test_schedules_become_functions_of_the_step(scheduler, schedule, steps, warmup, final):
    settings = read({"scheduler": scheduler})
    optimizer = settings.optimizer
    assert (optimizer.schedule, settings.steps, optimizer.warmup_steps, optimizer.final_fraction) == (
        schedule,
        steps,
        warmup,
        final,
    )


def test_the_schedules_peak_comes_before_the_optimizers_rate_as_in_deepspeed():
    document = {
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-5, "warmup_type": "linear"}},
    }
    assert read(document).optimizer.learning_rate == 3e-5
    (remark,) = remarks(read(document))
    assert "warmup_max_lr (3e-05) is the peak, not deepspeed.optimizer.params.lr (1e-05)" in remark


@pytest.mark.parametrize(
    ("block", "wanted"),
    [
        (
            {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 3}}},
            "optimizer.type is 'OneBitAdam'. trainrun has AdamW",
        ),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, "optimizer.params.betas is [0.9]. Allowed: a list of two"),
        ({"optimizer": {"type": "AdamW", "params": {"weight_dekay": 0}}}, "Did you mean 'weight_decay'?"),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "Use deepspeed.gradient_clipping"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}}, "adam_w_mode is False"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "scheduler.type is 'OneCycle'. Allowed: WarmupLR, WarmupDecayLR"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-6}}}, "warmup_min_lr is 1e-06. Allowed: 0"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}}}, "warmup_type is 'log'. Allowed: 'linear'"),
        ({"gradient_clipping": -1}, "gradient_clipping is -1. Allowed: a number, 0 or more, or 'auto'"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale is 128, a scale that stays"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "are both true"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16_optimizer_states is True"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "are the same setting"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4. Allowed: 0 or 1 or 2 or 3"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "It rounds what ranks send"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, "Use strategy 'fsdp2' with sharding.shard_size"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "zero_hpz_partition_size is not supported"),
        ({"zero_optimization": {"stage": 3, "stage3_max_live_params": 1}}, "Did you mean 'stage3_max_live_parameters'?"),
        (
            {"zero_optimization": {"stage": 3, "max_live_parameters": 1, "stage3_max_live_parameters": 2}},
            "stage3_max_live_parameters and deepspeed.zero_optimization.max_live_parameters are the same setting",
        ),
        ({"communication_data_type": "bf16"}, "communication_data_type is 'bf16'. Allowed: 'fp32'"),
        ({"tensorboard": {"enabled": True}}, "trainrun writes metrics itself"),
        ({"amp": {"enabled": True}}, "NVIDIA's Apex is gone"),
        (
            {"train_bacth_size": 8},
            "deepspeed.train_bacth_size is no key of DeepSpeed that trainrun knows. Did you mean 'train_batch_size'?",
        ),
        ({"my_own": 8}, "deepspeed.my_own is no key of DeepSpeed that trainrun knows. Remove it"),
        ({"zero_optimization": 3}, "zero_optimization is 3. Allowed: a mapping."),
    ],
)
def test_what_is_not_understood_is_named_by_path_with_what_to_do(block, wanted):
    (problem,) = problems(block)
    assert wanted in problem


def test_blocks_that_are_switched_off_pass_even_where_deepspeed_has_removed_them():
    off = {name: {"enabled": False} for name in ("amp", "tensorboard", "flops_profiler", "curriculum_learning", "elasticity")}
    assert read({**off, "sparse_gradients": False, "amp": {"enabled": "auto", "opt_level": "auto"}}).strategy == "ddp"


@pytest.mark.parametrize(
    ("fp16", "bf16", "precision"), [(None, None, "fp32"), (False, None, "fp32"), (None, True, "bf16"), (True, False, "fp16")]
)
def test_enabled_blocks_choose_the_precision(fp16, bf16, precision):
    blocks = {name: {"enabled": value} for name, value in (("fp16", fp16), ("bfloat16", bf16)) if value is not None}
    assert read({"zero_optimization": {"stage": 1}, **blocks}).precision == precision


def test_old_spellings_are_understood():
    document = {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True, "prefetch_bucket_size": 10}}
    settings = read(document)
    assert (settings.sharding.offload_optimizer, settings.sharding.offload_parameters) == ("cpu", "cpu")
    zero = engine_tuning(document, stage=3, hidden_size=None)["zero_optimization"]
    assert zero == {"stage3_prefetch_bucket_size": 10}
    assert read({"zero_optimization": True}).strategy == "zero1"


# contradictions


def test_all_contradictions_are_reported_together_with_both_values_and_places():
    found = problems(
        {**TRAINER_ZERO3, "bf16": {"enabled": True}, "gradient_clipping": 1.0},
        strategy="fsdp2",
        precision="fp16",
        optimizer={"clip_norm": 0.5, "schedule": "wsd"},
    )
    assert found == [
        "deepspeed.zero_optimization.stage in ds.json makes strategy 'zero3', but strategy is 'fsdp2' in train.yaml. "
        "Change one of them.",
        "deepspeed.bf16.enabled in ds.json makes precision 'bf16', but precision is 'fp16' in train.yaml. Change one of them.",
        "deepspeed.gradient_clipping in ds.json makes optimizer.clip_norm 1.0, but optimizer.clip_norm is 0.5 in train.yaml. "
        "Change one of them.",
        "deepspeed.scheduler.type in ds.json makes optimizer.schedule 'linear', but optimizer.schedule is 'wsd' in train.yaml. "
        "Change one of them.",
    ]


def test_the_same_value_in_both_is_none():
    settings = read(SQUAD, precision="fp16", optimizer={"learning_rate": "3e-5"}, strategy="ddp")
    assert settings.optimizer.learning_rate == 3e-5


@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_a_file_goes_with_no_strategy_that_deepspeed_has_not(strategy):
    (problem,) = problems({"wall_clock_breakdown": True}, strategy=strategy)
    assert f"deepspeed is given, but strategy is {strategy!r}" in problem
    assert read({"wall_clock_breakdown": True}, strategy="zero2").strategy == "zero2"


# files


def test_a_file_is_found_beside_the_settings_and_named_in_messages(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    (tmp_path / "train.json").write_text(json.dumps({"deepspeed": "ds.json"}))
    settings = settle(tmp_path / "train.json", [])
    assert settings.strategy == "zero2"
    assert settings.deepspeed == {"zero_optimization": {"stage": 2}}, "what checkpoints record is what was read"
    assert settle(tmp_path / "train.json", ["--deepspeed.zero_optimization.stage=3"]).strategy == "zero3"
    with pytest.raises(ConfigError) as caught:
        settle(tmp_path / "train.json", ["--strategy=ddp"])
    assert "but strategy is 'ddp' in the command line" in str(caught.value)
    assert f"deepspeed.zero_optimization.stage in {tmp_path / 'ds.json'} makes" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        settle(tmp_path / "train.json", ["--deepspeed.zero_optimization.stage=3", "--strategy=ddp"])
    assert "deepspeed.zero_optimization.stage in the command line makes" in str(caught.value)


def test_a_file_and_keys_of_a_file_on_one_command_line_are_refused(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(SQUAD))
    file, key = f"--deepspeed={tmp_path / 'ds.json'}", "--deepspeed.zero_optimization.stage=3"
    for arguments in ([file, key], [key, file]):
        with pytest.raises(ConfigError, match="give deepspeed both as a whole and in parts, of which only the later would count"):
            settle(None, arguments)
    with pytest.raises(ConfigError, match=r"give deepspeed\.zero_optimization both as a whole"):
        settle(None, ["--deepspeed.zero_optimization=true", key])
    whole = '--deepspeed={"zero_optimization":{"overlap_comm":true}}'
    assert settle(None, [whole, key, "--deepspeed.bf16.enabled=true"]).deepspeed == {
        "zero_optimization": {"overlap_comm": True, "stage": 3},
        "bf16": {"enabled": True},
    }


def test_keys_that_are_wrong_are_said_with_the_file_that_holds_them(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2, "stagee": 3}, "tensorboard": {"enabled": True}}))
    with pytest.raises(ConfigError) as caught:
        settle(None, [f"--deepspeed={file}", "--steps=3"])
    unknown, refused = caught.value.problems
    assert unknown.startswith(f"{file}: deepspeed.zero_optimization.stagee is no key of DeepSpeed that trainrun knows.")
    assert refused.startswith(f"{file}: deepspeed.tensorboard is 'set'")
    (tmp_path / "train.json").write_text(json.dumps({"deepspeed": {"stagee": 3}}))
    with pytest.raises(ConfigError, match=r"train\.json: deepspeed\.stagee is no key"):
        settle(tmp_path / "train.json", ["--steps=3"])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"fp16": {} // none\n}', "JSON has no comments"),
        ('{"fp16": {}, "fp16": {}}', "'fp16' is there twice"),
        ("[1]", "holds list. Allowed: a mapping"),
        ("{", "is not JSON"),
    ],
)
def test_a_file_that_is_no_json_mapping_is_refused(tmp_path: Path, text, wanted):
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError, match=wanted):
        settle(None, [f"--deepspeed={tmp_path / 'ds.json'}"])


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"DeepSpeed file nowhere\.json cannot be read"):
        settle(None, ["--deepspeed=nowhere.json"])
