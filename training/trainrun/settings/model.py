"""Settings of the bundled GPT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainrun.config import ConfigError, nearest
from trainrun.settings.presets import PRESETS


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The bundled GPT. Of no meaning to scripts that bring a model of their own."""

    preset: str = ""
    """A published shape, such as "llama3-8b", whose values take the place of the defaults below; what is set beside it counts."""
    vocabulary: int = 0
    """Rows of the embedding, one for each token id; 0 means as many as the dataset has."""
    layers: int = 4
    width: int = 128
    """Size of the residual stream; a multiple of heads."""
    heads: int = 4
    kv_heads: int = 0
    """Heads of keys and values, each shared by heads / kv_heads queries (grouped-query attention); 0 means heads."""
    feed_forward: int = 0
    """Inner width of the feed-forward layers; 0 means 4 x width."""
    activation: Literal["relu2", "swiglu"] = "relu2"
    """Of the feed-forward layers: squared ReLU (two matrices) or SwiGLU (three)."""
    norm_weights: bool = False
    """Whether the norms have weights of their own."""
    norm_epsilon: float = 1e-6
    """Added to the mean square that a norm divides by; the same in every precision."""
    embedding_norm: bool = True
    """Whether embeddings are normalised before the first block."""
    query_key_norm: bool = True
    """Whether queries and keys are normalised, which bounds attention's logits at high learning rates."""
    rope_base: float = 10_000.0
    """Base of the rotary positions' wavelengths."""
    rope_scaling: float = 1.0
    """How many times longer than Llama 3's 8192 tokens the context is to be, in the way of Llama 3.1; 1 changes nothing."""
    tied: bool = True
    """Whether the output layer shares the embedding's weights."""

    def __post_init__(self) -> None:
        problems = []
        if self.preset and self.preset not in PRESETS:
            problems.append(f"preset is {self.preset!r}, which is unknown. {nearest(self.preset, PRESETS)}")
        if self.vocabulary < 0:
            problems.append(f"vocabulary is {self.vocabulary}. Allowed: 0 (the dataset's) or more.")
        if min(self.layers, self.width, self.heads) < 1:
            problems.append(f"layers, width and heads are {self.layers}, {self.width} and {self.heads}. Allowed: 1 or more.")
        elif self.width % self.heads or (self.width // self.heads) % 2:
            problems.append(f"width is {self.width} with {self.heads} heads. Allowed: an even multiple of heads.")
        if self.heads >= 1 and (self.kv_heads < 0 or (self.kv_heads and self.heads % self.kv_heads)):
            divisors = ", ".join(str(n) for n in range(1, min(self.heads, 1024) + 1) if self.heads % n == 0)
            problems.append(f"kv_heads is {self.kv_heads} with {self.heads} heads. Allowed: 0 (as many as heads), {divisors}.")
        if self.feed_forward < 0:
            problems.append(f"feed_forward is {self.feed_forward}. Allowed: 0 (4 x width) or more.")
        if not self.rope_base > 1:
            problems.append(f"rope_base is {self.rope_base}. Allowed: more than 1.")
        if not self.rope_scaling >= 1:
            problems.append(f"rope_scaling is {self.rope_scaling}. Allowed: 1 (none) or more.")
        if not self.norm_epsilon > 0:
            problems.append(f"norm_epsilon is {self.norm_epsilon}. Allowed: more than 0.")
        if problems:
            raise ConfigError(problems)
