"""The units of a model: the repeated layers that are sharded, recomputed and compiled one by one."""

from __future__ import annotations

from torch import nn


def units(model: nn.Module) -> list[nn.Module]:
    """The elements of the outermost lists of repeated layers, in the order of the model: a decoder's blocks, and an encoder's.

    A list of repeated layers is an ``nn.ModuleList`` or ``nn.Sequential`` whose elements are all of one class and have
    submodules of their own (a list of bare ``nn.Linear`` is a part of a layer, not a stack of them). Empty when there is none.
    """
    if _repeats(model):
        return list(dict.fromkeys(model.children()))  # a layer that is used twice is one unit
    return list(dict.fromkeys(unit for child in model.children() for unit in units(child)))


def _repeats(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential) or not len(module):
        return False
    return len({type(element) for element in module}) == 1 and any(True for _ in module[0].children())
