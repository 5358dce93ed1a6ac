"""Model FLOPs utilisation (MFU): what a model needs a token, over what the devices could do at most.

Conventions of FLOPs per token, each named wherever an MFU is shown:

- ``6N+12Lhs`` (the bundled GPT): 6 for each of the N parameters that take part in a matrix product (forward 2, backward 4),
  that is all of them but an input embedding that the output layer does not share; and 12 for attention's two products per
  layer L, head width times heads h, and position s, without a discount for the causal half (PaLM, appendix B).
- ``6P`` (any other model): 6 for each of its P parameters, attention's products left out.

A model may say better: ``flops_per_token(sequence_length) -> float``, and the name of its convention as ``flops_convention``.
Recomputed activations count for nothing, as in every MFU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from trainrun.settings.train import Precision


@dataclass(frozen=True)
class ModelFlops:
    """What training on one token takes."""

    per_token: float
    convention: str


def flops_of(model: nn.Module, *, sequence_length: int) -> ModelFlops:
    """FLOPs per token, forward and backward, of a whole model: to be asked before it is sharded."""
    own = getattr(model, "flops_per_token", None)
    if own is not None:
        return ModelFlops(float(own(sequence_length)), getattr(model, "flops_convention", "flops_per_token"))
    return ModelFlops(6.0 * sum(parameter.numel() for parameter in model.parameters()), "6P")


def peak_flops(device: str, *, precision: Precision, tf32: bool) -> float | None:
    """Dense peak of a device in FLOP/s; None when it is not known, since a wrong one would be worse.

    Args:
        device: as the driver names it, such as "NVIDIA H100 80GB HBM3".
    """
    if re.search(r"\bMIG\b|PCIe|NVL\b", device, re.IGNORECASE):  # parts, and variants with other clocks
        return None
    for name, peaks in _PEAKS.items():
        if re.search(rf"\b{name}\b", device):
            tera = peaks.get("tf32" if precision == "fp32" and tf32 else precision)
            return None if tera is None else tera * 1e12
    return None


_PEAKS: dict[str, dict[str, float]] = {
    # TFLOP/s without sparsity, from NVIDIA's datasheets of each; where those give only figures with sparsity, half of them.
    # The SXM or HGX variant where there are several, as on EC2. Left out because sources disagree: A10G (70 or 125 in bf16),
    # B300, RTX PRO, and what B200 and GB200 do in fp32 and TF32.
    "V100": {"fp32": 15.7, "fp16": 125},
    "T4": {"fp32": 8.1, "fp16": 65},
    "A100": {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312},
    "L4": {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121, "fp8": 242},
    "L40S": {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362, "fp8": 733},
    "H100": {"fp32": 67, "tf32": 495, "bf16": 989, "fp16": 989, "fp8": 1979},
    "H200": {"fp32": 67, "tf32": 495, "bf16": 989, "fp16": 989, "fp8": 1979},
    "B200": {"bf16": 2250, "fp16": 2250, "fp8": 4500},
    "GB200": {"bf16": 2500, "fp16": 2500, "fp8": 5000},
}
