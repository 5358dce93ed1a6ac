"""Tensor parallelism: neighbouring ranks split each matrix product of a model (Shoeybi et al. 2019, "Megatron-LM").

All parameters become DTensors, those that are not split too, because an update that takes many parameters at once takes either
DTensors or plain tensors. Activations between modules stay plain tensors, the same on each of the ranks.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from trainrun.config import ConfigError


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the model's parameters over the ranks of ``mesh``, in place. Its weights are already the same on all of them.

    How is said by the model's method ``tensor_parallel_plan(ranks)``, which returns one word for each pattern of modules' names
    (``*`` stands for one part of a name; the first that matches counts). What its modules compute on activations must follow
    from their sizes, as attention's number of heads does.

    - ``"columns"``: each rank has some of the outputs of an ``nn.Linear``, and hands on those.
    - ``"columns, gathered"``: the same, but all outputs are handed on.
    - ``"rows"``: each rank has the weights of some of the inputs of an ``nn.Linear``, and is given those; results are summed.
    - ``"vocabulary"``: each rank has some of the rows of an ``nn.Embedding``.
    - ``"input"``: modules in this one split its first argument's products, whose gradients are summed in one go.

    Parameters of all other modules are the same on each rank.

    Raises:
        ConfigError: the model has no such plan, or cannot be divided among so many ranks.
    """
    if not callable(getattr(model, "tensor_parallel_plan", None)):
        raise ConfigError(
            [
                f"sharding.tensor_parallel is {mesh.size()}, but {type(model).__name__} does not say how it is to be split. "
                "Allowed: 1, the bundled GPT, or a model with a method tensor_parallel_plan(ranks), as "
                "trainrun.strategies.tensor_parallel describes it."
            ]
        )
    plan: dict[str, str] = model.tensor_parallel_plan(mesh.size())  # type: ignore[operator]
    shared = _shared_parameters(model)
    for name, module in list(model.named_modules()):
        parallelize_module(module, mesh, _style(name, plan), src_data_rank=None)
    for first, *others in shared:
        for other in others:
            owner, _, leaf = other.rpartition(".")
            model.get_submodule(owner).register_parameter(leaf, model.get_parameter(first))


def _style(name: str, plan: dict[str, str]) -> ParallelStyle:
    """What a module becomes."""
    match next((word for pattern, word in plan.items() if _matches(name, pattern)), ""):
        case "columns":
            return ColwiseParallel()
        case "columns, gathered":
            return ColwiseParallel(output_layouts=Replicate())
        case "rows":
            return RowwiseParallel()
        case "vocabulary":
            return RowwiseParallel(input_layouts=Replicate())
        case "input":
            return _SharedInput()
        case "":
            return _Same()
        case word:
            raise ConfigError(
                [
                    f"The model's tensor_parallel_plan says {word!r} for {name}. Allowed: 'columns', 'columns, gathered', "
                    "'rows', 'vocabulary', 'input'."
                ]
            )


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _shared_parameters(model: nn.Module) -> list[list[str]]:
    """The names of parameters that have several, such as a head's that is the embedding's."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [group for group in names.values() if len(group) > 1]


class _SharedInput(ParallelStyle):
    """Its first argument is handed on as a DTensor, on which the gradients of all products with it come together."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: (_replicated(args[0], device_mesh), *args[1:]))
        return module


class _Same(ParallelStyle):
    """Its own parameters are the same on each rank, and so is what it computes with them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = list(module.named_parameters(recurse=False))
        for name, parameter in own:
            same = distribute_tensor(parameter, device_mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(same, requires_grad=parameter.requires_grad))
        if own:
            module.register_forward_pre_hook(
                lambda _, args, kwargs: (
                    tuple(_replicated(value, device_mesh) for value in args),
                    {key: _replicated(value, device_mesh) for key, value in kwargs.items()},
                ),
                with_kwargs=True,
            )
            module.register_forward_hook(lambda _, args, output: _whole(output))
        return module


def _replicated(value: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value
