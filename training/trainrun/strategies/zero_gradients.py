"""Gradients of parameters that not every backward pass reaches, for which DeepSpeed would take others.

It keeps some gradients in buffers from step to step. The first micro-batch writes over what it reaches, later ones add: what
only a later one reaches would be added to the gradient of the step before, and what none reaches would be updated by it. And
with offload it hands to the optimizer what the last micro-batch reaches, so that what only an earlier one used would stay.
"""

from __future__ import annotations

from typing import Any

import torch

from trainrun.strategies.zero_parts import is_stage_3


def forget_gradients(zero: Any) -> None:
    """Let there be no gradients, as before the first micro-batch.

    Args:
        zero: the optimizer of DeepSpeed's engine.
    """
    zero.zero_grad(set_to_none=True)
    if is_stage_3(zero):
        zero._pre_step()
    elif hasattr(zero, "averaged_gradients"):  # not so the optimizer that DeepSpeed has for stage 1 in bf16
        for gradients in (zero.averaged_gradients, zero.all_grad_tensors):
            gradients.update(dict.fromkeys(gradients))
        zero.micro_step_id = -1
        if zero.cpu_offload:
            zero._offload_accumulated_param_ids = set()
            zero.reset_cpu_buffers()


@torch.no_grad()
def forget_old_gradients(zero: Any) -> None:
    """Zero what the step's first micro-batch did not reach; to be called after its backward pass.

    Args:
        zero: the optimizer of DeepSpeed's engine.
    """
    if is_stage_3(zero):
        buffers = zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        for group in zero.fp16_groups:
            for parameter in group:
                if parameter.ds_id not in zero._offload_boundary_param_ids:
                    buffers[parameter.ds_id].zero_()
    elif getattr(zero, "cpu_offload", False):
        for number, buffer in zero.accumulated_grads_in_cpu.items():
            if number not in zero._offload_accumulated_param_ids:
                buffer.zero_()


@torch.no_grad()
def hand_over_gradients(zero: Any) -> None:
    """With offload, let the update use all gradients of this step and of none before; to be called before it.

    Args:
        zero: the optimizer of DeepSpeed's engine.
    """
    if is_stage_3(zero):
        if zero.offload_optimizer:
            _hand_over_stage_3(zero)
    elif getattr(zero, "cpu_offload", False):
        _hand_over(zero)


def _hand_over_stage_3(zero: Any) -> None:
    parameters = [(n, p, zero.get_param_id(p)) for n, group in enumerate(zero.fp16_groups) for p in group]
    reached = zero._offload_boundary_param_ids
    if any(p.ds_id in reached and number not in zero.norm_for_param_grads for _, p, number in parameters):
        zero.finalize_gradient_accumulation_boundary()
    for group, parameter, number in parameters:
        flat = zero.fp32_partitioned_groups_flat[group]
        if parameter.ds_id not in reached and flat.grad is not None:  # None: on a disk
            _, offset, size = zero.grad_position[number]
            flat.grad.narrow(0, offset, size).zero_()


def _hand_over(zero: Any) -> None:
    """Of stages 1 and 2."""
    if zero._offload_accumulated_param_ids - zero.norm_for_param_grads.keys():
        zero.finalize_gradient_accumulation_boundary()
    for group, parameters in enumerate(zero.params_in_partition):
        for number in map(zero.get_param_id, parameters):
            if number not in zero.norm_for_param_grads:
                _, _, offset, size = zero.grad_position[number]
                zero.single_partition_of_fp32_groups[group].grad.narrow(0, offset, size).zero_()
