"""Any method of a model as a forward."""

from __future__ import annotations

from typing import Any

from torch import nn


class Methods(nn.Module):
    """Lets any method of a model run as the forward on which a wrapper (DDP, FSDP, DeepSpeed) hangs its work."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, method)(*args, **kwargs)
