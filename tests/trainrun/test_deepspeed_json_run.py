"""A DeepSpeed file trains like the settings that it means."""

import json

import pytest

DOCUMENT = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.99], "eps": "auto", "weight_decay": 0.02}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 4, "warmup_type": "linear"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e6,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "steps_per_print": 2,
    "zero_force_ds_cpu_optimizer": False,
}

BY_HAND = [
    *("--strategy=zero3", "--sharding.offload_optimizer=cpu", "--batch_tokens=128", "--micro_batch=2", "--steps=4"),
    *("--optimizer.clip_norm=0.5", "--optimizer.learning_rate=2e-3", "--optimizer.beta2=0.99", "--optimizer.weight_decay=0.02"),
    *("--optimizer.schedule=linear", "--optimizer.warmup_steps=2", "--optimizer.final_fraction=0"),
]


@pytest.mark.slow
def test_ux_02_ux_05_a_file_trains_like_the_settings_that_it_means(ranks, dataset, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(DOCUMENT))
    model = ["--sequence_length=16", "--model.layers=2", "--model.width=32", "--model.heads=2", f"--data={dataset}"]
    by_file = ranks("train", world=2, arguments=[*model, f"--deepspeed={tmp_path / 'ds.json'}"])
    by_hand = ranks("train", world=2, arguments=[*model, *BY_HAND])
    for one, other in zip(by_file, by_hand, strict=True):
        assert (one.code, other.code) == (0, 0), one.log + other.log
        assert one.result["losses"] == other.result["losses"]
        assert one.result["rates"] == other.result["rates"] == [1e-3, 2e-3, 1e-3, 0]
        assert one.result["tokens"] == 4 * 128
    assert "steps_per_print: progress is trainrun's line every log_every steps" in by_file[0].log
    assert "steps_per_print" not in by_file[1].log, "once for all ranks"
