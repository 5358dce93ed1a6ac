"""What every strategy does for `trainrun.run.Run`, so that the user's loop need not know which it is."""

from __future__ import annotations

import abc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainrun.checkpoint.parts import Part
from trainrun.config import ConfigError
from trainrun.models.weights import Weights
from trainrun.precision import LossScale
from trainrun.ranks import Ranks
from trainrun.settings import TrainSettings


class Strategy(abc.ABC):
    """One model and its optimizer on all ranks.

    Attributes:
        module: the user's model, once `prepare` has made it ready.
        weights: where what the model has on the meta device is read from (`trainrun.models.weights`); by default its own
            ``initial``. `Run.prepare` sets it.
        skipped: steps whose update was left out because their gradient was not finite (fp16 only), in this process.
        loss_scale: that of fp16; None otherwise.
    """

    module: nn.Module
    weights: Weights | None = None

    def __init__(self, settings: TrainSettings, ranks: Ranks) -> None:
        self.settings, self.ranks = settings, ranks
        self.skipped = 0
        self.loss_scale = LossScale() if settings.precision == "fp16" else None

    @abc.abstractmethod
    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put the model in its place on this rank, and let the optimizer's groups hold what is updated here.

        The optimizer must not have taken a step yet. Rank 0's weights become those of all ranks; what is on the meta device
        is read from ``weights``, by each rank what it needs.

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

    def rehearse(self, batch: Any) -> None:
        """A forward and backward pass of the model's ``loss``, to measure memory with (`trainrun.probe`). Collective.

        It changes nothing but the gradients, which stay until `forget_gradients`.

        Raises:
            ConfigError: this strategy cannot take it back.
        """
        raise ConfigError(
            [
                f'micro_batch is "auto", which cannot be measured under {self.settings.strategy}: what a pass leaves behind '
                "there cannot be taken back. Set micro_batch to a number."
            ]
        )

    def forget_gradients(self) -> None:
        """Forget what `rehearse` left behind."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def without_state(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """What the optimizer updates on this rank and has no state of yet: its first step will make some."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [parameter for parameter in parameters if parameter.requires_grad and not optimizer.state.get(parameter)]

    @abc.abstractmethod
    def model_parts(self) -> list[Part]:
        """What of the model (parameters and persistent buffers, in fp32 where they train in fp32) is on this rank.

        Raises:
            ConfigError: the model keeps something in its state that is no tensor.
        """

    @abc.abstractmethod
    def optimizer_parts(self, optimizer: torch.optim.Optimizer) -> list[Part]:
        """What of the optimizer's state is on this rank: nothing before the first step.

        Raises:
            ConfigError: the optimizer has a parameter that is not the model's.
        """

    @abc.abstractmethod
    def optimizer_targets(self, optimizer: torch.optim.Optimizer, wanted: dict[str, Tensor]) -> list[Part]:
        """Replace the optimizer's state by tensors to restore into, without taking a step; hyperparameters stay.

        Args:
            optimizer: as it was prepared.
            wanted: state by name, as meta tensors that tell the shape of the whole and the type.

        Raises:
            ConfigError: state is wanted for what is not trained here.
        """

    def values(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Small JSON values that belong to the state, equal on all ranks: "strategy/skipped", with fp16 "strategy/loss_scale"."""
        scale = {} if self.loss_scale is None else {"strategy/loss_scale": self.loss_scale.state()}
        return {"strategy/skipped": self.skipped, **scale}

    def load_values(self, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
        """Go on from what `values` gave, of this or another strategy and precision; follows `optimizer_targets`."""
        self.skipped = values.get("strategy/skipped", 0)
        if self.loss_scale is not None and "strategy/loss_scale" in values:
            self.loss_scale.load_state(values["strategy/loss_scale"])

    def restored(self) -> None:  # noqa: B027 (most have nothing to do)
        """Called on all ranks when parts and values have been restored: the place to update what depends on them."""

    @abc.abstractmethod
    def mesh_sizes(self) -> dict[str, int]:
        """How the ranks are arranged: "replicate", "shard" and "tensor", as far as there are any; for the record."""


def copy_from_first(model: nn.Module) -> None:
    """Let all ranks have rank 0's parameters and buffers, but for what is on the meta device. Collective."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            dist.broadcast(tensor.detach(), src=0)
