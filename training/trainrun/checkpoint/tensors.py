"""A model and its optimizer in parts, where they consist of plain tensors and DTensors::

    model/<parameter or buffer>                    canonical name, without the prefixes of wrappers
    optimizer/<parameter>/<key>                    the optimizer's state, by parameter name, never by number

Small values of the optimizer that are no tensors go beside them under the same names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parameter import is_lazy

from trainrun.checkpoint.layout import ITEM_SIZES
from trainrun.checkpoint.parts import Part, whole
from trainrun.config import ConfigError
from trainrun.ranks import Ranks

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names that DDP, torch.compile, activation checkpointing and FSDP put into a parameter's path."""

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZES}
"""The types that a checkpoint's tensors may have."""

Named = dict[str, Tensor]
Values = dict[str, Any]


@dataclass(frozen=True)
class Arrangement:
    """Which ranks hold which part of a tensor.

    Attributes:
        ranks: all of them; a plain tensor is the same on each.
        mesh: the same ranks by what they share; DTensors live on it or on some of its dimensions. None when there are none.
    """

    ranks: Ranks
    mesh: DeviceMesh | None

    def part(self, name: str, tensor: Tensor) -> Part:
        """This rank's part of a tensor."""
        tensor = tensor.detach()
        if not isinstance(tensor, DTensor):
            return whole(name, tensor, copies=self.ranks.size, copy=self.ranks.rank)
        shape, start = _shape_and_start(tensor)
        local = tensor.to_local()
        assert tuple(local.shape) == shape, f"{name}: {tuple(local.shape)} lies here, {shape} should"
        copies, copy = self._copies(tensor)
        return Part(name, local, tuple(tensor.shape), start, copies, copy)

    def _copies(self, tensor: DTensor) -> tuple[int, int]:
        """How many ranks hold what this one does, and which of them this is: along dimensions that do not shard it."""
        mesh = tensor.device_mesh
        sharding = {d for d, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)}
        if mesh.size() < self.ranks.size:  # on some dimensions of the mesh: the same along the others
            assert self.mesh is not None and self.mesh.mesh_dim_names and mesh.mesh_dim_names, "a mesh of unnamed dimensions"
            sharding = {self.mesh.mesh_dim_names.index(mesh.mesh_dim_names[d]) for d in sharding}
            mesh = self.mesh
        assert mesh.size() == self.ranks.size and not any(p.is_partial() for p in tensor.placements)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        copies, copy = 1, 0
        for dimension, size in enumerate(mesh.shape):
            if dimension not in sharding:
                copies, copy = copies * size, copy * size + coordinate[dimension]
        return copies, copy


def _shape_and_start(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's part of a DTensor lies in the whole.

    fully_shard of what tensor parallelism has split already gives a strided placement: of the tensor's dimension, what later
    dimensions of the mesh made of it is divided once more. That is how it is computed here. Torch's own function for DTensors
    divides in the order of the mesh, which gives other sizes where they do not divide evenly.
    """
    strided = [isinstance(placement, _StridedShard) for placement in tensor.placements]
    assert sum(strided) <= 1, tensor.placements
    order = sorted(range(len(strided)), key=strided.__getitem__)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    placements = [Shard(p.dim) if isinstance(p, _StridedShard) else p for p in tensor.placements]
    return _compute_local_shape_and_global_offset(
        tensor.shape, [mesh.shape[d] for d in order], [coordinate[d] for d in order], [placements[d] for d in order]
    )


def canonical(name: str) -> str:
    """The name of a parameter without what wrappers added to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def model_tensors(model: nn.Module) -> Named:
    """Parameters and persistent buffers; a tensor with several names (tied weights) under the first of them.

    Raises:
        ConfigError: the model keeps something in its state_dict that no checkpoint can hold.
    """
    tensors: Named = {}
    own_names: dict[str, str] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                [f"The model's state holds {name!r}, a {type(tensor).__name__}. Only tensors can be saved: use buffers."]
            )
        if id(tensor) not in seen:
            seen.add(id(tensor))
            require_savable(f"The model's {name}", tensor)
            key = f"model/{canonical(name)}"
            if key in tensors:
                raise ConfigError(
                    [
                        f"The model's {own_names[key]} and {name} have the same name in a checkpoint, where what wrappers add "
                        f"({', '.join(WRAPPERS)}) is left out of names. Rename one of them."
                    ]
                )
            tensors[key], own_names[key] = tensor.detach(), name
    return tensors


def require_savable(what: str, tensor: Tensor) -> None:
    """Require that a tensor can be written to a checkpoint and restored from it.

    Raises:
        ConfigError: it cannot, and why.
    """
    kind = str(tensor.dtype).removeprefix("torch.")
    if is_lazy(tensor):
        problem = "has no shape yet: run one forward pass before run.prepare()"
    elif tensor.layout != torch.strided:
        problem = f"is sparse ({tensor.layout}): only dense tensors can be saved"
    elif kind not in DTYPES:
        problem = f"is of type {kind}. Allowed: {', '.join(DTYPES)}"
    elif tensor.is_inference():
        problem = "was made under torch.inference_mode(), and could not be restored: make it outside, or clone it"
    elif not isinstance(tensor, DTensor) and any(n > 1 and by == 0 for n, by in zip(tensor.shape, tensor.stride(), strict=True)):
        problem = "is expanded, so that its elements share memory: use .clone()"
    else:
        return
    raise ConfigError([f"{what} {problem}."])


def model_parts(model: nn.Module, arrangement: Arrangement) -> list[Part]:
    """This rank's parts of the model; raises as `model_tensors`."""
    return [arrangement.part(name, tensor) for name, tensor in model_tensors(model).items()]


def optimizer_parts(optimizer: torch.optim.Optimizer, model: nn.Module, arrangement: Arrangement) -> list[Part]:
    """This rank's parts of the optimizer's state.

    Raises:
        ConfigError: the optimizer has a parameter that is not the model's.
    """
    state = _state_by_name(optimizer, model)
    return [arrangement.part(name, value) for name, value in state.items() if isinstance(value, Tensor)]


def optimizer_targets(optimizer: torch.optim.Optimizer, model: nn.Module, wanted: Named, arrangement: Arrangement) -> list[Part]:
    """Replace the optimizer's state by empty tensors to restore into.

    State of a parameter's shape comes to lie as the parameter does, other state (step counters) is whole on each rank.

    Args:
        optimizer: keeps its hyperparameters.
        model: whose parameters it has.
        wanted: names, shapes and types of the state, on the meta device.
        arrangement: of the parameters.

    Raises:
        ConfigError: state is wanted for parameters that the model or the optimizer has not.
    """
    groups = _groups_by_name(optimizer, model)
    require_trained(wanted, groups)
    optimizer.state.clear()
    for name, kind in wanted.items():
        parameter_name, key = parameter_and_key(name)
        parameter, group = groups[parameter_name]
        optimizer.state[parameter][key] = _empty_state(key, kind, parameter, group)
    return optimizer_parts(optimizer, model, arrangement)


def optimizer_values(optimizer: torch.optim.Optimizer, model: nn.Module) -> Values:
    """What the optimizer keeps by parameter that is no tensor, such as a step counter of its own."""
    return {name: value for name, value in _state_by_name(optimizer, model).items() if not isinstance(value, Tensor)}


def load_optimizer_values(optimizer: torch.optim.Optimizer, model: nn.Module, values: Values) -> None:
    """Put back what `optimizer_values` took, beside the state that `optimizer_targets` made; raises as that."""
    groups = _groups_by_name(optimizer, model)
    mine = {name: value for name, value in values.items() if name.startswith("optimizer/")}
    require_trained(mine, groups)
    for name, value in mine.items():
        parameter_name, key = parameter_and_key(name)
        optimizer.state[groups[parameter_name][0]][key] = value


def _state_by_name(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    names: dict[Any, str] = {parameter: canonical(name) for name, parameter in model.named_parameters()}
    state = {}
    for parameter, values in optimizer.state.items():
        if not isinstance(parameter, Tensor):
            raise ConfigError([f"The optimizer has state under {parameter!r}. Only state of a parameter can be saved."])
        if parameter not in names:
            raise ConfigError([f"The optimizer has a parameter of shape {tuple(parameter.shape)} that the model has not."])
        for key, value in values.items():
            _require_savable_state(f"The optimizer's state {key!r} of {names[parameter]}", key, value)
            state[f"optimizer/{names[parameter]}/{key}"] = value
    return state


def _require_savable_state(what: str, key: Any, value: Any) -> None:
    if not isinstance(key, str) or "/" in key:
        raise ConfigError([f"{what} has no name that can be saved. Allowed: text without /."])
    if isinstance(value, Tensor):
        require_savable(what, value)
    elif not _is_json(value):
        allowed = "tensors, and numbers and text in lists and mappings"
        raise ConfigError([f"{what} is a {type(value).__name__} that cannot be saved. Allowed: {allowed}."])


def _is_json(value: Any) -> bool:
    """Whether JSON gives back exactly this."""
    if isinstance(value, list):
        return all(_is_json(each) for each in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(each) for key, each in value.items())
    return value is None or type(value) in (bool, int, float, str)


def _groups_by_name(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, tuple[Tensor, dict[str, Any]]]:
    """The parameters that the optimizer has, each with its group."""
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    return {canonical(name): (p, groups[p]) for name, p in model.named_parameters() if p in groups}


def require_trained(names: Iterable[str], trained: Collection[str]) -> None:
    """Require that all optimizer state of these names is of a parameter that is ``trained``.

    Raises:
        ConfigError: it is not.
    """
    unknown = sorted({parameter_and_key(name)[0] for name in names} - set(trained))
    if unknown:
        raise ConfigError([f"The checkpoint has optimizer state for what is not trained here: {', '.join(unknown)}."])


def parameter_and_key(name: str) -> tuple[str, str]:
    """``optimizer/<parameter>/<key>`` as parameter and key."""
    parameter, _, key = name.removeprefix("optimizer/").rpartition("/")
    return parameter, key


def _empty_state(key: str, kind: Tensor, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    if key != "step" and kind.shape == parameter.shape:
        return torch.empty_like(parameter.detach(), dtype=kind.dtype)
    # torch keeps a step counter on the CPU unless the update itself runs on the device
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return torch.empty(kind.shape, dtype=kind.dtype, device="cpu" if on_host else parameter.device)
