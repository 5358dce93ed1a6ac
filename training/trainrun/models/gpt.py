"""A GPT: rotary positions, RMSNorm, grouped-query attention, no biases; by its settings also Llama's architecture.

Plain PyTorch, to be read and changed. ``loss`` returns the sum over the batch's valid tokens, which is what
`trainrun.run.Run.backward` divides by the step's count of valid tokens over all ranks.
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainrun.config import ConfigError
from trainrun.data.batch import IGNORED, Batch
from trainrun.models.rotary import rotate, rotations
from trainrun.settings import ModelSettings


class GPT(nn.Module):
    """A decoder over ``vocabulary`` tokens that sees at most ``context`` of them at once.

    Its weights are those of `initial`, drawn by the seed that torch had when the model was made. Made under
    ``torch.device("meta")`` it takes no memory, and whoever gives it memory takes the weights from there.

    Raises:
        ConfigError: ``settings.vocabulary`` is too small for the dataset's.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, settings: ModelSettings, *, vocabulary: int, context: int) -> None:
        super().__init__()
        if 0 < settings.vocabulary < vocabulary:
            raise ConfigError(
                [f"model.vocabulary is {settings.vocabulary}, the dataset has token ids up to {vocabulary - 1}. Set it higher."]
            )
        self.settings, self.context, self._seed = settings, context, torch.initial_seed()
        rows = settings.vocabulary or vocabulary
        self.embedding = nn.Embedding(rows, settings.width)
        self.embedding_norm = norm(settings) if settings.embedding_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = norm(settings)
        self.head = nn.Linear(settings.width, rows, bias=False)
        if settings.tied:
            self.head.weight = self.embedding.weight
        cosine, sine = rotations(context, settings)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self._shapes = {name: parameter.shape for name, parameter in self.named_parameters()}
        if not self.embedding.weight.is_meta:
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    parameter.copy_(self.initial(name))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the token after each of ``tokens`` (batch, time)."""
        x = self.embedding_norm(self.embedding(tokens))
        rotation = self.cosine[: tokens.shape[1]], self.sine[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, rotation)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, batch: Batch) -> Tensor:
        """Sum of the cross-entropies, in nats, of the batch's valid tokens."""
        logits = self(batch.inputs).float()
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum")

    flops_convention = "6N+12Lhs"

    def flops_per_token(self, sequence_length: int) -> float:
        """Forward and backward; the convention is described in `trainrun.metrics.flops`."""
        parameters = sum(parameter.numel() for parameter in self.parameters())
        looked_up = 0 if self.settings.tied else self.embedding.weight.numel()
        return 6 * (parameters - looked_up) + 12 * self.settings.layers * self.settings.width * sequence_length

    def tensor_parallel_plan(self, ranks: int) -> dict[str, str]:
        """How ``ranks`` ranks split the model; the words are those of `trainrun.strategies.tensor_parallel.split`.

        Heads, feed-forward columns and the vocabulary are divided; all else is the same on each.

        Raises:
            ConfigError: heads or feed-forward columns cannot be divided by ``ranks``.
        """
        heads, shared = self.settings.heads, self.settings.kv_heads or self.settings.heads
        inner = self.settings.feed_forward or 4 * self.settings.width
        common = math.gcd(heads, shared, inner)
        if common % ranks:
            allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise ConfigError(
                [
                    f"sharding.tensor_parallel is {ranks}, which does not divide the model's {heads} heads, {shared} kv_heads "
                    f"and {inner} feed_forward columns. Allowed for this model: {allowed}."
                ]
            )
        return {
            "embedding": "vocabulary",
            "blocks.*.attention": "input",
            "blocks.*.attention.queries": "columns",
            "blocks.*.attention.keys": "columns",
            "blocks.*.attention.values": "columns",
            "blocks.*.attention.out": "rows",
            "blocks.*.feed_forward": "input",
            "blocks.*.feed_forward.gate": "columns",
            "blocks.*.feed_forward.up": "columns",
            "blocks.*.feed_forward.down": "rows",
            "head": "columns, gathered",
        }

    def initial(self, name: str) -> Tensor:
        """The whole of a parameter or buffer before the first step: fp32, on the CPU, the same on every rank.

        Every layer keeps the size of its input, and every block starts as the identity, whatever the depth.

        Args:
            name: as in ``named_parameters()`` or ``named_buffers()`` of the model as it was made.
        """
        if name in ("cosine", "sine"):
            with torch.device("cpu"):
                return dict(zip(("cosine", "sine"), rotations(self.context, self.settings), strict=True))[name]
        weight = torch.empty(self._shapes[name], dtype=torch.float32, device="cpu")
        if name.endswith("norm.weight"):
            return weight.fill_(1.0)
        if name.endswith(("attention.out.weight", "feed_forward.down.weight")):
            return weight.zero_()
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        source = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
        return weight.normal_(std=0.02 if name == "embedding.weight" else weight.shape[1] ** -0.5, generator=source)

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int, *, temperature: float = 0.8, seed: int = 0) -> list[int]:
        """``count`` tokens that continue ``prompt`` (at least one token), drawn at ``temperature``; 0 takes the likeliest."""
        device = self.embedding.weight.device
        source = torch.Generator(device=device).manual_seed(seed)
        tokens = torch.tensor([prompt], device=device)
        for _ in range(count):
            logits = self(tokens[:, -self.context :])[:, -1].float()
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=source)
            tokens = torch.cat([tokens, token], dim=1)
        return tokens[0, len(prompt) :].tolist()


class Block(nn.Module):
    """Attention, then feed-forward, each added to the residual stream."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.attention_norm = norm(settings)
        self.attention = Attention(settings)
        self.feed_forward_norm = norm(settings)
        self.feed_forward = FeedForward(settings)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        added: Tensor = self.feed_forward(self.feed_forward_norm(x))
        return x + added


class Attention(nn.Module):
    """Causal self-attention, several heads of queries to each of keys and values.

    The number of heads is that of the projections' outputs: under tensor parallelism those of this rank.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.size = settings.width // settings.heads
        self.normalize = settings.query_key_norm
        self.epsilon = settings.norm_epsilon
        shared = (settings.kv_heads or settings.heads) * self.size
        self.queries = nn.Linear(settings.width, settings.width, bias=False)
        self.keys = nn.Linear(settings.width, shared, bias=False)
        self.values = nn.Linear(settings.width, shared, bias=False)
        self.out = nn.Linear(settings.width, settings.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        queries, keys, values = (self._heads(project(x)) for project in (self.queries, self.keys, self.values))
        queries, keys = rotate(queries, *rotation), rotate(keys, *rotation)
        if self.normalize:
            queries, keys = (F.rms_norm(heads, (self.size,), eps=self.epsilon) for heads in (queries, keys))
        grouped = keys.shape[1] != queries.shape[1]
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, projected: Tensor) -> Tensor:
        """(batch, time, heads x size) as (batch, heads, time, size)."""
        return projected.view(*projected.shape[:2], -1, self.size).transpose(1, 2)


class FeedForward(nn.Module):
    """Two layers with a squared ReLU between them (Primer, So et al. 2021), or SwiGLU's three (Shazeer 2020)."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        inner = settings.feed_forward or 4 * settings.width
        self.gate = nn.Linear(settings.width, inner, bias=False) if settings.activation == "swiglu" else None
        self.up = nn.Linear(settings.width, inner, bias=False)
        self.down = nn.Linear(inner, settings.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.up(x)).square() if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        projected: Tensor = self.down(inner)
        return projected


def norm(settings: ModelSettings) -> nn.RMSNorm:
    """Root-mean-square norm over the residual stream."""
    return nn.RMSNorm(settings.width, eps=settings.norm_epsilon, elementwise_affine=settings.norm_weights)
