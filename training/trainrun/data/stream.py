"""The streams of micro-batches that a training loop reads: each rank's share of every global batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainrun.config import ConfigError
from trainrun.data.batch import Batch
from trainrun.data.feed import Feed, Positions
from trainrun.data.order import Indices, sequence_at
from trainrun.data.tokenizer import BYTES
from trainrun.ranks import Ranks

PLACES_AT_ONCE = 1024
"""Sequences whose places in the dataset are found together."""


class Stream(Feed):
    """A feed of one dataset, whose place a checkpoint can keep.

    Args:
        batch: sequences per optimizer step over all ranks; a multiple of ``ranks.data_size``.
        micro_batch: most sequences per rank in one forward pass.
        identity: what gives a position its meaning, by name: a checkpoint with another one cannot be resumed.
    """

    vocabulary: int
    """Token ids are below it; for whoever builds a model."""
    sequence_length: int
    """Most tokens of a sequence that are given to the model."""

    def __init__(self, *, batch: int, micro_batch: int, ranks: Ranks, identity: dict[str, Any]) -> None:
        super().__init__(batch=batch, share=batch // ranks.data_size, micro_batch=micro_batch, ranks=ranks)
        self._identity = identity

    def state(self) -> dict[str, Any]:
        """What a checkpoint records; the same on all ranks and for any number of them."""
        return {**self._identity, "position": self.position}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken.

        Raises:
            ConfigError: the dataset, the sequence length or the seed is another, so that positions mean other text.
        """
        changed = [name for name in self._identity if state.get(name) != self._identity[name]]
        if changed:
            raise ConfigError(
                f"The checkpoint was trained with {name} {state.get(name)!r}, this run has {self._identity[name]!r}: the order "
                f"of the data would not go on. Set it back, or start another run by another name."
                for name in changed
            )
        self.position = int(state["position"])


class TokenStream(Stream):
    """Sequences of one length, cut from a stream of tokens.

    Args:
        tokens: the training split.
        vocabulary: token ids are below it; for whoever builds a model.
        fingerprint: identifies the dataset across restarts.
        tokenizer: its name, which checkpoints record for whoever generates text or evaluates.
        batch_tokens: tokens per optimizer step over all ranks.
        sequence_length: tokens per sequence.
        micro_batch: most sequences per rank in one forward pass.
        seed: of the order.

    Raises:
        ConfigError: the batch does not divide among the ranks, or the dataset is shorter than one sequence.
    """

    def __init__(
        self,
        tokens: np.ndarray[Any, np.dtype[Any]],
        *,
        vocabulary: int,
        fingerprint: str,
        tokenizer: str = BYTES,
        batch_tokens: int,
        sequence_length: int,
        micro_batch: int,
        seed: int,
        ranks: Ranks,
    ) -> None:
        batch = _sequences_per_step(batch_tokens, sequence_length)
        _check_share(batch, sequence_length, ranks.data_size)
        identity = {"fingerprint": fingerprint, "sequence_length": sequence_length, "seed": seed}
        super().__init__(batch=batch, micro_batch=micro_batch, ranks=ranks, identity=identity)
        self.vocabulary, self.sequence_length = vocabulary, sequence_length
        self.sequences = (len(tokens) - 1) // sequence_length
        if self.sequences < 1:
            raise ConfigError(
                [f"The dataset has {len(tokens)} tokens, a sequence needs {sequence_length + 1}. Set sequence_length lower."]
            )
        self._tokens, self._seed, self._tokenizer = tokens, seed, tokenizer
        self._offsets = np.arange(sequence_length + 1)
        self._places: tuple[int, Indices] = 0, np.empty((0, self.share), dtype=np.uint64)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "tokenizer": self._tokenizer}

    @property
    def valid_tokens(self) -> int:
        """Every target of a packed dataset is valid."""
        return self._batch * self.sequence_length

    def _read(self, positions: Positions) -> tuple[Tensor, ...]:
        starts = self._find(positions).astype(np.int64) * self.sequence_length
        return (torch.from_numpy(self._tokens[starts[:, None] + self._offsets].astype(np.int64)),)

    def _find(self, positions: Positions) -> Indices:
        """The sequences at ``positions``, which follow one another within a step.

        They are found for many steps at once, since the arithmetic costs about the same for one and for a thousand.
        """
        first, places = self._places
        step, start = divmod(int(positions[0]) - first, self._batch)
        if not (0 <= step < len(places) and start + len(positions) <= self.share):
            first, step, start = int(positions[0]), 0, 0
            steps = np.arange(-(-PLACES_AT_ONCE // self.share), dtype=np.uint64) * np.uint64(self._batch)
            wanted = np.uint64(first) + steps[:, None] + np.arange(self.share, dtype=np.uint64)
            places = sequence_at(wanted.ravel(), count=self.sequences, seed=self._seed).reshape(wanted.shape)
            self._places = first, places  # one assignment: another thread may be reading
        found: Indices = places[step, start : start + len(positions)]
        return found

    def _as_batch(self, *tensors: Tensor) -> Batch:
        (both,) = tensors
        return Batch(inputs=both[:, :-1], targets=both[:, 1:])


def _sequences_per_step(batch_tokens: int, sequence_length: int) -> int:
    if batch_tokens % sequence_length:
        raise ConfigError([f"batch_tokens is {batch_tokens}, not a multiple of the sequence length {sequence_length}."])
    return batch_tokens // sequence_length


def _check_share(batch: int, sequence_length: int, world: int) -> None:
    if batch % world:
        worlds = ", ".join(str(n) for n in range(1, min(batch, 64) + 1) if batch % n == 0)
        near = max(1, round(batch / world)) * world * sequence_length
        raise ConfigError(
            [
                f"A batch of {batch * sequence_length} tokens is {batch} sequences of {sequence_length}, which do not divide "
                f"among {world} ranks. Allowed numbers of ranks: {worlds}. Or set batch_tokens to {near}."
            ]
        )
