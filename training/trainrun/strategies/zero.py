"""ZeRO stages 1 to 3, by DeepSpeed's engine: optimizer state, gradients and parameters divided among the ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainrun.checkpoint.parts import Part, whole
from trainrun.checkpoint.tensors import canonical, model_tensors, parameter_and_key, require_trained
from trainrun.config import ConfigError
from trainrun.models.weights import give_memory, on_meta, weights_of
from trainrun.precision import COMPUTED_IN, autocast, set_tf32
from trainrun.ranks import Ranks
from trainrun.settings import TrainSettings
from trainrun.strategies import zero_parts
from trainrun.strategies.base import Strategy, copy_from_first
from trainrun.strategies.divisible import indivisible
from trainrun.strategies.methods import Methods
from trainrun.strategies.torch_base import prepare_units, trained_names
from trainrun.strategies.zero_engine import (
    STAGES,
    engine_configuration,
    linear_layers,
    load_deepspeed,
    start_engine,
    zero_converter,
)
from trainrun.strategies.zero_gradients import forget_gradients, forget_old_gradients, hand_over_gradients
from trainrun.strategies.zero_nvme import DiskCopies, nvme_problems

ELEMENTWISE = ["Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Lion", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
"""Optimizers whose update of an element depends on no other: ZeRO hands them stretches of flattened parameters."""


Originals = dict[nn.Parameter, tuple[int, Tensor]]
"""fp32 weights by parameter: some elements of it in a row, and the first of them."""


class ZeRO(Strategy):
    """One stage of ZeRO, with the run's own accumulation, clipping, learning rates and loss scale.

    Parameters and their gradients are in the precision of the computation, master weights and the optimizer's state in fp32.
    The user's optimizer takes the steps, on the master weights of this rank.
    """

    def __init__(self, settings: TrainSettings, ranks: Ranks) -> None:
        super().__init__(settings, ranks)
        self.stage = STAGES[settings.strategy]
        self._disk: DiskCopies | None = None
        self._micro_batches = 0
        self._diverged = False

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        deepspeed = load_deepspeed(self.ranks)
        self._require_support(model, optimizer)
        trained_names(model, optimizer)
        set_tf32(self.settings, self.ranks.device)
        self.module = model.float()
        prepare_units(model, self.settings, self.ranks.device)
        forward = _Forward(model, self.settings, self.ranks.device)
        configuration = engine_configuration(self.settings, model)
        self._frozen: dict[nn.Parameter, tuple[zero_parts.Stretch, Tensor]] = {}
        self._linear = nn.functional.linear
        originals = self._divide(model, configuration) if self.stage == 3 else self._place(model)
        self.engine = start_engine(deepspeed, forward, optimizer, configuration)
        if self.settings.sharding.offload_optimizer == "nvme":
            self._disk = DiskCopies(self.engine.optimizer)
        if self.settings.precision != "fp32":
            for one in self._trained():
                start, weights = originals.pop(one.parameter)
                one.weights.copy_(weights[one.stretch.start - start :][: one.stretch.elements])
            if self._disk is not None:
                self._disk.write()

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, last: bool) -> Any:
        self.engine.set_gradient_accumulation_boundary(last)
        with linear_layers(self._linear):
            return self.engine(method, *args, **kwargs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        if self.loss_scale is None:
            loss = loss * self.ranks.size  # the engine takes the mean over the ranks; the sum is wanted
        else:
            self.engine.optimizer.override_loss_scale(self.loss_scale.value)
        with linear_layers(self._linear):  # for what is computed again
            self.engine.backward(loss, scale_wrt_gas=False)
        if self._micro_batches == 0 and (self.stage == 3 or not last):
            forget_old_gradients(self.engine.optimizer)
        self._micro_batches += 1

    def update(self, optimizer: torch.optim.Optimizer, *, clip_norm: float) -> Tensor:
        zero = self.engine.optimizer
        zero.clip_grad = clip_norm if math.isfinite(clip_norm) else 0.0
        if self.loss_scale is not None:  # here too the mean becomes the sum; in the loss it would overflow the sooner
            zero.override_loss_scale(self.loss_scale.value / self.ranks.size)
        hand_over_gradients(zero)
        if self._disk is not None:
            self._disk.forget()
        self._micro_batches = 0
        self.engine.step()
        zero_parts.require_tensors(optimizer)
        norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32, device=self.ranks.device)
        if self.loss_scale is not None:
            self.loss_scale.update(finite=not zero.overflow)
            self.skipped += zero.overflow
            if zero.overflow:  # with offload DeepSpeed would add the next step's gradients to these
                forget_gradients(zero)
        elif zero.overflow:  # DeepSpeed leaves out the step; without a loss scale to blame that must not pass unseen
            self._diverged = True
        return torch.full_like(norm, math.inf) if self._diverged else norm

    def rehearse(self, batch: Any) -> None:
        # never the last: gradients that are forgotten need not be handed over
        self.backward(self.call("loss", (batch,), {}, last=False), last=False)

    def forget_gradients(self) -> None:
        forget_gradients(self.engine.optimizer)
        self._micro_batches = 0

    def without_state(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        flats = {id(one.flat): one.flat for one in self._trained()}
        return [flat for flat in flats.values() if not optimizer.state.get(flat)]

    def model_parts(self) -> list[Part]:
        trained = self._trained()
        parts = [part for one in trained for part in one.stretch.parts(f"model/{one.stretch.name}", one.weights)]
        frozen = [part for stretch, share in self._frozen.values() for part in stretch.parts(f"model/{stretch.name}", share)]
        persistent = model_tensors(self.module)
        buffers = [
            whole(f"model/{canonical(name)}", buffer, copies=self.ranks.size, copy=self.ranks.rank)
            for name, buffer in self.module.named_buffers()
            if f"model/{canonical(name)}" in persistent
        ]
        return [*parts, *frozen, *buffers]

    def optimizer_parts(self, optimizer: torch.optim.Optimizer) -> list[Part]:
        return zero_parts.optimizer_parts(self._trained(), optimizer, self.ranks)

    def optimizer_targets(self, optimizer: torch.optim.Optimizer, wanted: dict[str, Tensor]) -> list[Part]:
        if self._disk is not None:
            self._disk.clear_state()
        optimizer.state.clear()
        trained = self._trained()
        by_name = {one.stretch.name: one for one in trained}
        require_trained(wanted, by_name)
        for name, kind in wanted.items():
            parameter, key = parameter_and_key(name)
            zero_parts.make_state(by_name[parameter], key, kind, optimizer)
        parts = zero_parts.optimizer_parts(trained, optimizer, self.ranks)
        # what never had a gradient has no state in other strategies' checkpoints: here, among others that have, it is zeros
        return [part for part in parts if part.name in wanted]

    def restored(self) -> None:
        for parameter, (_, share) in self._frozen.items():
            zero_parts.spread_frozen(parameter, share, self.ranks)
        if self._disk is not None:
            self._disk.write()
        zero_parts.spread_masters(self.engine.optimizer)

    def mesh_sizes(self) -> dict[str, int]:
        return {"shard": self.ranks.size}

    def _trained(self) -> list[zero_parts.Trained]:
        return zero_parts.trained(self.engine.optimizer, self.module, {} if self._disk is None else self._disk.read())

    def _require_support(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Raise a ConfigError of all that DeepSpeed cannot do here, or would do wrong."""
        from deepspeed.accelerator import get_accelerator

        problems = indivisible(model, self.settings.strategy)
        if self.settings.precision == "fp16" and not get_accelerator().is_fp16_supported():
            problems.append('precision is "fp16", which DeepSpeed does not have on this CPU. Set precision to "bf16" or "fp32".')
        if not any(kind.__name__ in ELEMENTWISE for kind in type(optimizer).__mro__):
            problems.append(
                f"The optimizer is {type(optimizer).__name__}, but {self.settings.strategy} hands the optimizer stretches of "
                "flattened parameters, which is right only where each element is updated by itself. Allowed: "
                f"{', '.join(ELEMENTWISE)}. Or set strategy to ddp or fsdp2."
            )
        idle = [n for n, group in enumerate(optimizer.param_groups) if not any(p.requires_grad for p in group["params"])]
        if idle:
            problems.append(
                f"No parameter of the optimizer's group {', '.join(map(str, idle))} requires gradients, which DeepSpeed cannot "
                "do. Leave such groups out."
            )
        if "nvme" in (self.settings.sharding.offload_optimizer, self.settings.sharding.offload_parameters):
            problems += nvme_problems(self.settings.sharding)
        if problems:
            raise ConfigError(problems)

    def _place(self, model: nn.Module) -> Originals:
        """Stages 1 and 2: the whole model onto this rank's device, with rank 0's weights.

        Returns:
            The weights of what trains, in fp32: DeepSpeed would make master weights of what is left of them in low precision.
        """
        if on_meta(model):
            give_memory(model, weights_of(model, self.weights), self.ranks.device)
        model.to(self.ranks.device)
        copy_from_first(model)
        originals: Originals = {}
        for name, parameter in model.named_parameters():
            if not self._keep_frozen(name, parameter) and self.settings.precision != "fp32":
                originals[parameter] = (0, parameter.detach().reshape(-1))
        return originals

    def _divide(self, model: nn.Module, configuration: dict[str, Any]) -> Originals:
        """Stage 3: one parameter after the other onto this rank's device, and from there to all ranks, to each its share.

        Returns:
            As `_place`, of each parameter what becomes this rank's.
        """
        weights = weights_of(model, self.weights) if on_meta(model) else None
        convert, self._linear = zero_converter(configuration)
        originals: Originals = {}
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                assert weights is not None
                given = nn.Parameter(weights.read(name).to(self.ranks.device, copy=True), requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, given)  # type: ignore[no-untyped-call]
            else:
                parameter.data = parameter.data.to(self.ranks.device)
                dist.broadcast(parameter.detach(), src=0)
            if not self._keep_frozen(name, parameter) and self.settings.precision != "fp32":
                start, share = zero_parts.own_share(parameter, self.ranks)
                originals[parameter] = (start, share.clone())
            parameter.data = parameter.data.to(COMPUTED_IN[self.settings.precision])
            convert(parameter)
        if weights is not None:
            give_memory(model, weights, self.ranks.device)  # the buffers
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.ranks.device)
            dist.broadcast(buffer, src=0)
        return originals

    def _keep_frozen(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether a parameter is frozen. Then this rank keeps its share of it in fp32 in main memory, for checkpoints."""
        if parameter.requires_grad:
            return False
        start, share = zero_parts.own_share(parameter, self.ranks)
        stretch = zero_parts.Stretch(canonical(name), tuple(parameter.shape), start, share.numel())
        self._frozen[parameter] = (stretch, share.to("cpu", copy=True))
        return True


class _Forward(Methods):
    """Any method of the model in the precision of the settings."""

    def __init__(self, model: nn.Module, settings: TrainSettings, device: torch.device) -> None:
        super().__init__(model)
        self._precision, self._device = settings.precision, device

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        # autocast decides what each operation computes in, as it does in the other strategies
        with autocast(self._precision, self._device):
            return super().forward(method, *args, **kwargs)
