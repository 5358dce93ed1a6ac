"""How much memory a model takes in each strategy, before it is made. Standard library only; all sizes in bytes.

States are those of "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv 1910.02054, figure 1): Adam
with mixed precision takes 16 bytes a parameter, of which the stages divide 12 (optimizer), 14 (and gradients) or all among the
ranks. The strategies of PyTorch come to the same sum: fp32 weights 4, gradients 4, two moments 8. Activations are counted from
what the bundled GPT keeps for its backward pass, and compared with it by a test. The factor for what an allocator holds beyond
what is in use was fitted to torchtitan's published runs of Llama 3 8B (62 to 84 GiB, within 2 % of three that it was not fitted
to); on other models and devices it is a guess.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainrun.counts import Shape, shape_of_settings
from trainrun.settings.sharding import Offload
from trainrun.settings.train import Checkpointing, Precision, Strategy, TrainSettings

RESERVED = 1.135
"""What an allocator reserves over what is in use."""

LOGITS = 12
"""Bytes for each logit of a micro-batch: as computed, in fp32, their log-softmax and gradients, as far as they live together."""

LIVE_UNITS = 2
"""Units that are gathered at once: the one at work and the next."""


def readable_size(size: float) -> str:
    """A size for people, in the units of GPUs' and papers' tables (10^9 bytes, or 10^6)."""
    if size < 1e9:
        return f"{size / 1e6:.3g} MB" if size < 0.9995e9 else "1 GB"
    return f"{size / 1e9:,.0f} GB" if size >= 1e11 else f"{size / 1e9:.3g} GB"


@dataclass(frozen=True, kw_only=True)
class States:
    """Parameters, gradients and optimizer state of one rank."""

    device: float
    host: float = 0.0
    """In the machine's memory, by offload."""


def model_states(
    strategy: Strategy,
    parameters: int,
    *,
    ranks: int,
    precision: Precision = "bf16",
    offload_optimizer: Offload = "none",
    offload_parameters: Offload = "none",
) -> States:
    """What lies on one rank through a whole step, before activations and what is gathered for the moment.

    Args:
        strategy: any but "auto".
        parameters: all of the model.
        ranks: among which it is divided; with hybrid sharding those of one shard group.
        offload_optimizer: "nvme" takes no memory (but for buffers, which are not counted).
    """
    assert strategy != "auto"
    computed = 4 if precision == "fp32" else 2
    if strategy in ("ddp", "fsdp2"):
        share = 16.0 * parameters / (1 if strategy == "ddp" else ranks)
        offloaded = "cpu" in (offload_optimizer, offload_parameters)
        return States(device=0.0, host=share) if offloaded else States(device=share)
    weights, gradients, optimizer = (each * float(parameters) for each in (computed, computed, 12))
    optimizer /= ranks
    if strategy != "zero1":
        gradients /= ranks
    if strategy == "zero3":
        weights /= ranks
    host = 0.0
    if offload_optimizer != "none":
        # the update takes gradients in fp32 beside master weights and moments
        host += optimizer + 4.0 * parameters / ranks if offload_optimizer == "cpu" else 0.0
        optimizer, gradients = 0.0, gradients if strategy == "zero1" else 0.0
    if offload_parameters != "none":
        host += weights if offload_parameters == "cpu" else 0.0
        weights = 0.0
    return States(device=weights + gradients + optimizer, host=host)


def host_bytes_of_bundled(settings: TrainSettings, *, ranks: int) -> float:
    """What one of ``ranks`` offloads into its machine's memory when the bundled GPT trains, at least: of the vocabulary only what
    the settings say. An "auto" that offloads is fsdp2.
    """
    sharding = settings.sharding
    parameters = shape_of_settings(settings.model, vocabulary=0).parameters // sharding.tensor_parallel
    return model_states(
        "fsdp2" if settings.strategy == "auto" else settings.strategy,
        parameters,
        ranks=sharding.shard_size or max(1, ranks // sharding.tensor_parallel),
        precision=settings.precision,
        offload_optimizer=sharding.offload_optimizer,
        offload_parameters=sharding.offload_parameters,
    ).host


def gathered(strategy: Strategy, parameters: int, *, largest_unit: int, outside: int, precision: Precision = "bf16") -> float:
    """Copies of parameters that a rank has for the moment: units at work and what lies outside of them, where parameters are
    divided; with ddp autocast's copies of all, which the backward pass uses again.

    Args:
        parameters: all of the model.
        largest_unit: parameters of the largest repeated layer.
        outside: parameters of no unit (embedding, output layer), which are gathered through the whole pass.
    """
    computed = 4 if precision == "fp32" else 2
    if strategy == "ddp":
        return 0.0 if precision == "fp32" else 2.0 * parameters
    if strategy not in ("fsdp2", "zero3"):
        return 0.0
    return float(LIVE_UNITS * computed * largest_unit + computed * outside + 4 * max(largest_unit, outside))


def activations(shape: Shape, *, tokens: int, precision: Precision = "bf16", checkpointing: Checkpointing = "none") -> float:
    """What one micro-batch keeps for its backward pass, without logits; attention as a flash kernel, so without its matrix.

    A layer keeps for each token, at h wide with q, k and v wide and f inside: in fp32 six times h (inputs of norms and sums),
    and in the precision of the computation 3 q + 3 k (before and after rotation and norm, values, what attention gives) and
    2 f, or 4 f with a gate. "selective" keeps the input and the results of matrix products and attention, "full" the input.
    """
    computed = 4 if precision == "fp32" else 2
    inner = (2 if shape.gated else 1) * shape.feed_forward
    everything = 24 * shape.width + computed * (3 * shape.query_width + 3 * shape.kv_width + 2 * inner)
    if checkpointing == "none":
        return float(tokens * shape.layers * everything)
    kept = 4 * shape.width
    if checkpointing == "selective":
        kept += computed * (2 * shape.width + 2 * shape.query_width + 2 * shape.kv_width + inner)
    return float(tokens * (shape.layers * kept + everything))  # and one layer that is computed again


def logits(shape: Shape, *, tokens: int) -> float:
    """What the output layer and the loss take for one micro-batch."""
    return float(LOGITS * tokens * shape.vocabulary)
