"""A model made ready for a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from trainrun.strategies.base import Strategy


class PreparedModel:
    """Stands for the user's model: calls go through the strategy and the precision, all else to the model itself.

    Args:
        strategy: has prepared the model already.
        last_micro_batch: whether the call belongs to the last micro-batch of a step, after which gradients are summed
            over the ranks; before it they only accumulate.
        passed: is told what each call with gradients enabled returned.
        advised: a context that explains failed allocations.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        last_micro_batch: Callable[[], bool],
        passed: Callable[[Any], None],
        advised: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.strategy = strategy
        self._last_micro_batch, self._passed, self._advised = last_micro_batch, passed, advised

    @property
    def module(self) -> nn.Module:
        """The user's model."""
        return self.strategy.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self._call("__call__", args, kwargs)

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """The model's ``loss``: by contract the sum over the batch's valid tokens."""
        return self._call("loss", args, kwargs)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._advised():
            result = self.strategy.call(method, args, kwargs, last=self._last_micro_batch())
        if torch.is_grad_enabled():
            self._passed(result)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)
