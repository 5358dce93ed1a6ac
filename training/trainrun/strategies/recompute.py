"""Activation checkpointing: compute activations again in the backward pass instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

EXPENSIVE = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_scaled_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(torch.ops.aten, name)
)
"""What "selective" keeps: matrix products and attention, nearly all of the work."""


def recompute(units: Sequence[nn.Module], *, selective: bool) -> None:
    """Let the backward pass of each unit compute its activations again from its inputs.

    The units stay the modules that they are, so that parameters keep their names. Random numbers (dropout) and autocast are
    the same as at first.

    Args:
        selective: keep the results of matrix products and attention.
    """
    for unit in units:
        unit.forward = _recomputed(unit.forward, selective=selective)


def _recomputed(forward: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    contexts: dict[str, Any] = {}
    if selective:
        contexts["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    return recomputed


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE
