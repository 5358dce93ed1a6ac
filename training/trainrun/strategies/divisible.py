"""Which parameters cannot be divided among ranks."""

from __future__ import annotations

from torch import nn


def indivisible(model: nn.Module, strategy: str) -> list[str]:
    """What is wrong with the parameters of ``model``, for a strategy that divides them: sentences that name them.

    ``fully_shard`` cuts the first dimension and DeepSpeed flat lines of elements; both send them in a real format.
    """
    parameters = dict(model.named_parameters())
    kinds = {
        "have no dimension to divide; give them the shape (1,)": [n for n, p in parameters.items() if not p.dim()],
        "are complex; make them of real numbers, with torch.view_as_complex in forward": [
            n for n, p in parameters.items() if p.is_complex()
        ],
        "have no elements; remove them": [n for n, p in parameters.items() if not p.numel() and strategy == "zero3"],
    }
    return [
        f"Parameters of {type(model).__name__} {what}, or set strategy to ddp, which divides none ({strategy} does): "
        f"{', '.join(names)}."
        for what, names in kinds.items()
        if names
    ]
