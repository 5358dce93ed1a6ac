"""Ranks that save as others do, by DeepSpeed and by torch.distributed.checkpoint: what `test_convert` converts.

Beside each checkpoint lies what DeepSpeed and torch themselves say is in it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import resharding
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainrun.data.batch import Batch
from trainrun.models.gpt import GPT
from trainrun.ranks import join
from trainrun.settings import ModelSettings
from trainrun.strategies.zero_engine import load_deepspeed, start_engine

MODEL = ModelSettings(layers=1, width=16, heads=2)
VOCABULARY, CONTEXT = 257, 16
STEPS = 2


def run_rank(out: Path, *, folder: str, deepspeed: dict[str, dict[str, Any]], universal: list[str]) -> dict[str, Any]:
    """The program of one rank.

    Args:
        folder: where to; each checkpoint in a folder of its own, with ``truth.pt`` beside it.
        deepspeed: by name, configurations to save one checkpoint of each; and "dcp", by FSDP2, in any case.
        universal: those of which DeepSpeed's own command is to make universal ones, in folders "universal <name>".
    """
    ranks = join(timeout_seconds=60.0, storage_timeout_seconds=60.0)
    _save_dcp(Path(folder))
    engine = load_deepspeed(ranks)
    for name, configuration in deepspeed.items():
        print(f"saving {name}", flush=True)
        _save_deepspeed(engine, Path(folder), name, configuration)
    if ranks.first:
        for name in universal:
            _make_universal(Path(folder), name)
    return {}


def _model() -> GPT:
    torch.manual_seed(0)
    return resharding.OddGPT(MODEL, vocabulary=VOCABULARY, context=CONTEXT)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, as most people have."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1]}, {"params": [p for p in trained if p.dim() < 2]}]
    return torch.optim.AdamW(groups, lr=1e-2)


def _batch(step: int) -> Batch:
    source = torch.Generator().manual_seed(10 * step + dist.get_rank())
    tokens = torch.randint(VOCABULARY, (2, CONTEXT + 1), generator=source)
    return Batch(tokens[:, :-1], tokens[:, 1:])


class _Loss(nn.Module):
    """The loss as the forward pass, which is what DeepSpeed's engine calls."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.module = model

    def forward(self, batch: Batch) -> Tensor:
        return self.module.loss(batch)


def _save_deepspeed(deepspeed: Any, folder: Path, name: str, configuration: dict[str, Any]) -> None:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    common = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    stage = configuration["zero_optimization"]["stage"]
    model = _model()
    if configuration.get("bf16") and stage < 3:
        model = model.bfloat16()
    engine = start_engine(deepspeed, _Loss(model), _optimizer(model), {**common, **configuration})
    for step in range(STEPS):
        engine.backward(engine(_batch(step)) / 32)
        engine.step()
    of_the_user = {"random": np.random.get_state(), "arguments": argparse.Namespace(folder=folder)}
    engine.save_checkpoint(str(folder / name), client_state={"of_the_user": of_the_user})
    if stage < 3:  # DeepSpeed would know the state of the first group alone
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    truth: dict[str, Tensor] = {}
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            truth[f"model/{parameter_name}"] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                truth[f"optimizer/{parameter_name}/{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
            truth[f"optimizer/{parameter_name}/step"] = torch.tensor(float(STEPS))
        else:
            truth[f"model/{parameter_name}"] = _gathered(parameter).float()
    truth["model/seen"] = model.seen.clone()
    if dist.get_rank() == 0:
        torch.save(truth, folder / name / "truth.pt")
    engine.destroy()


def _make_universal(folder: Path, name: str) -> None:
    from deepspeed.checkpoint import ds_to_universal

    target = folder / f"universal {name}"
    sys.argv = ["ds_to_universal", "--inject_missing_state", "--num_extract_workers=1", "--num_merge_workers=1"]
    sys.argv += [f"--input_folder={folder / name / f'global_step{STEPS}'}", f"--output_folder={target}"]
    ds_to_universal.main(ds_to_universal.parse_arguments())
    shutil.copy(folder / name / "truth.pt", target)


def _gathered(parameter: nn.Parameter) -> Tensor:
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().clone()
    from deepspeed import zero

    with zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _save_dcp(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    model = _model()
    fully_shard(model.blocks[0])
    fully_shard(model)
    optimizer = _optimizer(model)
    for step in range(STEPS):
        model.loss(_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    path = folder / "dcp"
    dcp.save({"model": weights, "optimizer": state, "step": STEPS, "of_the_user": torch.ones(3)}, checkpoint_id=path)
    truth = {f"model/{name}": _whole(tensor) for name, tensor in weights.items()}
    for name, values in state["state"].items():
        truth |= {f"optimizer/{name}/{key}": _whole(value) for key, value in values.items()}
    if dist.get_rank() == 0:
        torch.save(truth, path / "truth.pt")


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
