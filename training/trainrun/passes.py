"""Whether a loop's forward and backward passes are such that gradients are right under every strategy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Passes:
    """Forward passes of the prepared model and `trainrun.run.Run.backward` of the present step, by micro-batch.

    Replicas and shards sum gradients over the ranks in the backward pass of a micro-batch's own forward passes. Any other order
    trains without a word on numbers that are wrong, or only with several ranks; so it is refused with any number of them.
    """

    def __init__(self) -> None:
        self._pending: int | None = None
        self._done: set[int] = set()

    def forward(self, micro_batch: int, result: Any) -> None:
        """Note a pass with gradients enabled.

        Args:
            micro_batch: a number that is each micro-batch's own within a step.
            result: what the model returned; without a tensor that requires gradients there is nothing to go back through.

        Raises:
            RuntimeError: one of another micro-batch waits for its backward pass.
        """
        # an object that is no tensor may hold some: it counts as if it did
        if not any(leaf.requires_grad if isinstance(leaf, Tensor) else True for leaf in tree_leaves(result)):
            return
        if self._pending not in (None, micro_batch):
            raise RuntimeError(
                "The model was called for another micro-batch before run.backward() of the one before. Call run.backward(loss) "
                "after each model.loss(batch), before the next batch; and evaluate under torch.no_grad()."
            )
        self._pending = micro_batch

    def backward(self, micro_batch: int) -> None:
        """Note the backward pass of all forward passes that wait for one.

        Raises:
            RuntimeError: none waits, or the micro-batch had its backward pass.
        """
        if self._pending is None:
            raise RuntimeError(
                "run.backward() got a loss that is not from a call of the prepared model with gradients enabled. Use the model "
                "that run.prepare() returned, by model(...) or model.loss(...): with several ranks only these sum gradients."
            )
        if micro_batch in self._done:
            raise RuntimeError(
                "run.backward() was called twice for one micro-batch. Add a micro-batch's losses up and call it once; and loop "
                "over data.micro_batches() itself, once a step, not over a list of it."
            )
        self._pending = None
        self._done.add(micro_batch)

    def end_step(self, micro_batches: int) -> None:
        """Require that all passes are done, and begin the next step.

        Raises:
            RuntimeError: a forward pass waits for its backward pass, or a micro-batch had none.
        """
        if self._pending is not None:
            raise RuntimeError(
                "The model was called with gradients enabled and run.backward(loss) did not follow before run.step(). Call "
                "run.backward(loss), not loss.backward(), after each model.loss(batch); and evaluate under torch.no_grad()."
            )
        if len(self._done) < micro_batches:
            raise RuntimeError(
                f"run.step() came after run.backward(loss) for {len(self._done)} of this step's {micro_batches} micro-batches. "
                "Call run.backward(model.loss(batch)) for each."
            )
        self._done.clear()


def require_loss(loss: object) -> None:
    """Require what a backward pass can start from.

    Raises:
        TypeError: no tensor.
        ValueError: more than one number, or nothing that requires gradients.
    """
    wanted = "Give it one number that requires gradients: the sum over the micro-batch's valid tokens, as model.loss returns it."
    if not isinstance(loss, Tensor):
        raise TypeError(f"run.backward() got a {type(loss).__name__}. {wanted}")
    if loss.ndim:
        raise ValueError(f"run.backward() got a loss of shape {tuple(loss.shape)}. {wanted}")
    if not loss.requires_grad:
        raise ValueError(f"run.backward() got a loss without gradients (detached, or made under torch.no_grad()). {wanted}")


def require_prepared(optimizer: torch.optim.Optimizer, prepared: torch.optim.Optimizer | None, *, groups: int) -> None:
    """Require the optimizer that was prepared, with as many ``groups`` as it had then.

    Raises:
        RuntimeError: another one, or one with more groups.
    """
    if optimizer is not prepared:
        raise RuntimeError(
            f"run.step() got another optimizer ({type(optimizer).__name__}) than run.prepare() returned. Give it that one."
        )
    if len(optimizer.param_groups) != groups:
        raise RuntimeError(
            f"The optimizer has {len(optimizer.param_groups)} groups of parameters, and had {groups} in run.prepare(). Call "
            "add_param_group before run.prepare(): later ones would not be spread over the ranks."
        )
