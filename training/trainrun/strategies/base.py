"""What every strategy does for `trainrun.run.Run`, so that the user's loop need not know which it is."""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.ranks import Ranks
from trainrun.settings import TrainSettings


class Strategy(abc.ABC):
    """One model and its optimizer on all ranks.

    Attributes:
        module: the user's model, once `prepare` has made it ready.
        skipped: steps whose update was left out because their gradient was not finite (fp16 only), in this process.
    """

    module: nn.Module

    def __init__(self, settings: TrainSettings, ranks: Ranks) -> None:
        self.settings, self.ranks = settings, ranks
        self.skipped = 0

    @abc.abstractmethod
    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put the model in its place on this rank, and let the optimizer's groups hold what is updated here.

        The optimizer must not have taken a step yet. Rank 0's weights become those of all ranks.

        Raises:
            ConfigError: this model, this optimizer or this machine does not go with the strategy or the precision.
        """

    @abc.abstractmethod
    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, last: bool) -> Any:
        """A method of the model, in the strategy's precision.

        Args:
            last: whether this is the step's last micro-batch: gradients before it need not be summed over ranks yet.
        """

    @abc.abstractmethod
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add gradients. After the last micro-batch they are those of the **sum** of ``loss`` over data ranks and calls."""

    @abc.abstractmethod
    def update(self, optimizer: torch.optim.Optimizer, *, clip_norm: float) -> Tensor:
        """Clip, take the optimizer's step (on all ranks or on none), and forget the gradients.

        Args:
            optimizer: as it was prepared, with the step's learning rates in its groups.
            clip_norm: largest global norm; infinite for none.

        Returns:
            The norm of the whole gradient before clipping, on the device; not finite when the step was skipped.
        """
