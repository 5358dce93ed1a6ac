"""What a checkpoint holds, as tensors by name::

    model/<parameter or buffer>                    canonical name, without the prefixes of wrappers
    optimizer/<parameter>/<key>                    the optimizer's state, by parameter name, never by number
    rng/<rank>/torch|numpy|python|<device>         random streams of each rank

Small values that are no tensors go beside them under the same names.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainrun.config import ConfigError

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names that DDP, torch.compile, activation checkpointing and FSDP put into a parameter's path."""

Named = dict[str, Tensor]
Values = dict[str, Any]


def canonical(name: str) -> str:
    """The name of a parameter without what wrappers added to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def model_tensors(model: nn.Module) -> Named:
    """Parameters and persistent buffers; a tensor with several names (tied weights) under the first of them.

    Raises:
        ConfigError: the model keeps something else in its state_dict.
    """
    tensors: Named = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                [f"The model's state holds {name!r}, a {type(tensor).__name__}. Only tensors can be saved: use buffers."]
            )
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[f"model/{canonical(name)}"] = tensor.detach()
    return tensors


def model_digest(model: nn.Module) -> str:
    """sha256 over a model's tensors by name, bit for bit: equal for a model in memory and its restored checkpoint."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model_tensors(model).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """The canonical name of each parameter."""
    return {parameter: canonical(name) for name, parameter in model.named_parameters()}


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[Named, Values]:
    """The optimizer's state by parameter name.

    Raises:
        ConfigError: the optimizer has a parameter that is not the model's.
    """
    names = parameter_names(model)
    tensors: Named = {}
    values: Values = {}
    for parameter, state in optimizer.state.items():
        if parameter not in names:
            raise ConfigError([f"The optimizer has a parameter of shape {tuple(parameter.shape)} that the model has not."])
        for key, value in state.items():
            name = f"optimizer/{names[parameter]}/{key}"
            if isinstance(value, Tensor):
                tensors[name] = value.detach()
            else:
                values[name] = value
    return tensors, values


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Named, values: Values) -> None:
    """Replace the optimizer's state. Its hyperparameters stay those of the settings.

    Raises:
        ConfigError: state for parameters that the model or the optimizer has not.
    """
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    by_name = {name: parameter for parameter, name in parameter_names(model).items() if parameter in groups}
    state: dict[Tensor, dict[str, Any]] = {}
    unknown = set()
    for name, value in {**values, **tensors}.items():
        parameter_name, _, key = name.removeprefix("optimizer/").rpartition("/")
        if parameter_name not in by_name:
            unknown.add(parameter_name)
            continue
        parameter = by_name[parameter_name]
        if isinstance(value, Tensor):
            group = groups[parameter]
            # torch keeps a step counter on the CPU unless the update itself runs on the device
            stays = key == "step" and not (group.get("capturable") or group.get("fused"))
            value = value if stays else value.to(parameter.device)
        state.setdefault(parameter, {})[key] = value
    if unknown:
        raise ConfigError([f"The checkpoint has optimizer state for what is not trained here: {', '.join(sorted(unknown))}."])
    optimizer.state.clear()
    optimizer.state.update(state)


def random_state(rank: int, device: torch.device) -> tuple[Named, Values]:
    """The random streams of this process."""
    prefix = f"rng/{rank}"
    algorithm, keys, position, has_gauss, gauss = np.random.get_state()
    version, numbers, next_gauss = random.getstate()
    tensors = {
        f"{prefix}/torch": torch.get_rng_state(),
        f"{prefix}/numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        f"{prefix}/python": torch.tensor(numbers, dtype=torch.int64),
    }
    if device.type != "cpu":
        tensors[f"{prefix}/{device.type}"] = torch.get_device_module(device).get_rng_state(device)
    values = {
        f"{prefix}/numpy": [algorithm, int(position), int(has_gauss), float(gauss)],
        f"{prefix}/python": [version, next_gauss],
    }
    return tensors, values


def load_random_state(rank: int, device: torch.device, tensors: Named, values: Values) -> None:
    """Set the random streams of this process to what `random_state` took."""
    prefix = f"rng/{rank}"
    torch.set_rng_state(tensors[f"{prefix}/torch"])
    algorithm, position, has_gauss, gauss = values[f"{prefix}/numpy"]
    keys = tensors[f"{prefix}/numpy"].numpy().astype(np.uint32)
    np.random.set_state((algorithm, keys, position, has_gauss, gauss))
    version, next_gauss = values[f"{prefix}/python"]
    random.setstate((version, tuple(tensors[f"{prefix}/python"].tolist()), next_gauss))
    if f"{prefix}/{device.type}" in tensors:
        torch.get_device_module(device).set_rng_state(tensors[f"{prefix}/{device.type}"], device)


def owners(tensors: Named, world: int) -> dict[str, int]:
    """The rank that writes each tensor that all ranks hold: largest first to the rank that has least, so all upload alike."""
    load = [0] * world
    owner = {}
    for name in sorted(tensors, key=lambda n: (-tensors[n].nbytes, n)):
        owner[name] = load.index(min(load))
        load[owner[name]] += tensors[name].nbytes
    return owner
