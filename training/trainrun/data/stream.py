"""The stream of micro-batches that a training loop reads: each rank's share of every global batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from trainrun.config import ConfigError
from trainrun.data.batch import Batch
from trainrun.data.order import sequence_at
from trainrun.ranks import Ranks


class TokenStream:
    """Batches of ``batch_tokens`` over all ranks, however many there are; the state is one position.

    Args:
        tokens: the training split.
        vocabulary: token ids are below it; for whoever builds a model.
        fingerprint: identifies the dataset across restarts.
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
        batch_tokens: int,
        sequence_length: int,
        micro_batch: int,
        seed: int,
        ranks: Ranks,
    ) -> None:
        self.vocabulary = vocabulary
        self.sequence_length = sequence_length
        self.position = 0
        """Sequences consumed so far, over all ranks."""
        self.sequences = (len(tokens) - 1) // sequence_length
        if self.sequences < 1:
            raise ConfigError(
                [f"The dataset has {len(tokens)} tokens, a sequence needs {sequence_length + 1}. Set sequence_length lower."]
            )
        self._batch = _sequences_per_step(batch_tokens, sequence_length)
        self._share = _sequences_per_rank(self._batch, sequence_length, ranks.data_size)
        self._micro_batch = micro_batch
        self._tokens, self._seed, self._ranks = tokens, seed, ranks
        self._identity = {"fingerprint": fingerprint, "sequence_length": sequence_length, "seed": seed}
        self._given = 0

    @property
    def valid_tokens(self) -> int:
        """Valid targets of the present step over all ranks: every target of a packed dataset is one."""
        return self._batch * self.sequence_length

    @property
    def complete(self) -> bool:
        """Whether all micro-batches of the present step were given out, the last of them included."""
        return self._given == self._share

    def micro_batches(self) -> Iterator[Batch]:
        """This rank's share of the present step. `trainrun.run.Run.step` moves on to the next."""
        first = self.position + self._ranks.data_rank * self._share
        self._given = 0
        for start in range(0, self._share, self._micro_batch):
            stop = min(start + self._micro_batch, self._share)
            self._given = stop
            yield self._batch_at(np.arange(first + start, first + stop, dtype=np.uint64))

    def advance(self) -> None:
        """Move on to the next step."""
        self.position += self._batch
        self._given = 0

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

    def _batch_at(self, positions: np.ndarray[Any, np.dtype[np.uint64]]) -> Batch:
        starts = sequence_at(positions, count=self.sequences, seed=self._seed).astype(np.int64) * self.sequence_length
        taken = self._tokens[starts[:, None] + np.arange(self.sequence_length + 1)]
        both = torch.from_numpy(taken.astype(np.int64)).to(self._ranks.device)
        return Batch(inputs=both[:, :-1], targets=both[:, 1:])


def _sequences_per_step(batch_tokens: int, sequence_length: int) -> int:
    if batch_tokens % sequence_length:
        raise ConfigError([f"batch_tokens is {batch_tokens}, not a multiple of the sequence length {sequence_length}."])
    return batch_tokens // sequence_length


def _sequences_per_rank(batch: int, sequence_length: int, world: int) -> int:
    if batch % world:
        worlds = ", ".join(str(n) for n in range(1, min(batch, 64) + 1) if batch % n == 0)
        near = max(1, round(batch / world)) * world * sequence_length
        raise ConfigError(
            [
                f"A batch of {batch * sequence_length} tokens is {batch} sequences of {sequence_length}, which do not divide "
                f"among {world} ranks. Allowed numbers of ranks: {worlds}. Or set batch_tokens to {near}."
            ]
        )
    return batch // world
