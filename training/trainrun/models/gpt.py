"""A GPT: rotary positions, RMSNorm, squared-ReLU feed-forward, no biases, optionally tied output.

Plain PyTorch, to be read and changed. ``loss`` returns the sum over the batch's valid tokens, which is what
`trainrun.run.Run.backward` divides by the step's count of valid tokens over all ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainrun.data.batch import IGNORED, Batch
from trainrun.settings import ModelSettings


class GPT(nn.Module):
    """A decoder over ``vocabulary`` tokens that sees at most ``context`` of them at once."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, settings: ModelSettings, *, vocabulary: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocabulary, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.head = None if settings.tied else nn.Linear(settings.width, vocabulary, bias=False)
        cosine, sine = rotations(context, settings.width // settings.heads)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self.apply(initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the token after each of ``tokens`` (batch, time)."""
        x = norm(self.embedding(tokens))
        rotation = self.cosine[: tokens.shape[1]], self.sine[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, rotation)
        logits: Tensor = F.linear(norm(x), self.embedding.weight if self.head is None else self.head.weight)
        return logits

    def loss(self, batch: Batch) -> Tensor:
        """Sum of the cross-entropies, in nats, of the batch's valid tokens."""
        logits = self(batch.inputs).float()
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum")

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
        self.attention = Attention(settings.width, settings.heads)
        self.feed_forward = FeedForward(settings.width)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(norm(x), rotation)
        added: Tensor = self.feed_forward(norm(x))
        return x + added


class Attention(nn.Module):
    """Causal self-attention. Queries and keys are normalised, which keeps the logits bounded at high learning rates."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, time, width = x.shape
        heads = self.queries_keys_values(x).view(batch, time, 3, self.heads, width // self.heads)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, size of a head)
        queries, keys = norm(rotate(queries, *rotation)), norm(rotate(keys, *rotation))
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return projected


class FeedForward(nn.Module):
    """Two layers with a squared ReLU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down(F.relu(self.up(x)).square())
        return projected


def norm(x: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension, without weights."""
    return F.rms_norm(x, (x.shape[-1],))


def rotations(context: int, size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (context, size / 2) of the angles by which position turns each pair of a head's dimensions."""
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(context), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the pairs (i, i + size / 2) of the last dimension."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).type_as(x)


def initialize(module: nn.Module) -> None:
    """Every layer keeps the size of its input, and every block starts as the identity, whatever the depth."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, Block):
        nn.init.zeros_(module.attention.out.weight)
        nn.init.zeros_(module.feed_forward.down.weight)
