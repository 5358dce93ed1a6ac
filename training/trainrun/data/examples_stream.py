"""The stream of examples that fine-tuning reads: each rank's share of every batch, padded to the longest of a micro-batch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainrun.config import ConfigError
from trainrun.data.batch import IGNORED, Batch
from trainrun.data.examples import DETAIL, LENGTH, START, Examples
from trainrun.data.feed import Positions
from trainrun.data.order import sequence_at
from trainrun.data.stream import Stream
from trainrun.ranks import Ranks
from trainrun.settings.finetune import Task

Numbers = np.ndarray[Any, np.dtype[np.int64]]

MASKED_SHARE = 0.15
"""Of an example's tokens, those to be guessed; of them 80% are shown as the mask, 10% as another token, 10% as they are (Devlin
et al. 2019)."""


class ExampleStream(Stream):
    """Batches of ``batch_examples`` over all ranks. Prompts, padding and tokens that are not masked are no valid targets.

    The number of valid targets of every example is known beforehand, so that each rank knows that of the whole step.

    Args:
        examples: the dataset.
        task: what is learnt of it.
        batch_examples: examples per optimizer step over all ranks.
        sequence_length: tokens to which examples are cut; their last token, which marks the end, is kept where the model sees
            the whole text at once.
        micro_batch: most examples per rank in one forward pass.
        seed: of the order, and of what is masked.

    Attributes:
        description: of the dataset.

    Raises:
        ConfigError: the dataset is not for this task, nothing of it can be learnt at this length, or the batch does not divide
            among the ranks.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        task: Task,
        batch_examples: int,
        sequence_length: int,
        micro_batch: int,
        seed: int,
        ranks: Ranks,
    ) -> None:
        description = examples.description
        _check_task(examples, task)
        _check_share(batch_examples, ranks.data_size)
        identity = {"fingerprint": description.fingerprint, "sequence_length": sequence_length, "seed": seed, "task": task}
        super().__init__(batch=batch_examples, micro_batch=micro_batch, ranks=ranks, identity=identity)
        self.vocabulary, self.sequence_length = description.vocabulary, sequence_length
        self.description = description
        self._examples, self._task, self._seed = examples, task, seed
        valid = _valid_targets(examples.entries, task, sequence_length)
        self._learnable: Numbers = np.flatnonzero(valid)
        self._valid: Numbers = valid[self._learnable]
        self._tell(valid)

    @property
    def valid_tokens(self) -> int:
        """Valid targets of the present step over all ranks (classes, where these are learnt), counted without communication."""
        return int(self._valid[self._order(np.arange(self.position, self.position + self._batch, dtype=np.uint64))].sum())

    def _order(self, positions: Positions) -> Numbers:
        """Which of the learnable examples stand at these positions."""
        return sequence_at(positions, count=len(self._learnable), seed=self._seed).astype(np.int64)

    def sample(self, sequences: int) -> Batch:
        """So many times the longest example: the most memory that a micro-batch can need."""
        longest = self._examples.entries[self._learnable, LENGTH].argmax()
        chosen = np.full(sequences, self._learnable[longest])
        return self._on_device(self._tensors(chosen, np.arange(sequences, dtype=np.uint64)))

    def _read(self, positions: Positions) -> tuple[Tensor, ...]:
        return self._tensors(self._learnable[self._order(positions)], positions)

    def _tensors(self, chosen: Numbers, positions: Positions) -> tuple[Tensor, ...]:
        rows = [self._row(self._examples.entries[example], int(p)) for example, p in zip(chosen, positions, strict=True)]
        inputs, present = self._padded([row[0] for row in rows], self.description.padding)
        if self._task == "classification":
            return inputs, torch.from_numpy(self._examples.entries[chosen, DETAIL].copy()), present
        return inputs, self._padded([row[1] for row in rows], IGNORED)[0], present

    def _as_batch(self, *tensors: Tensor) -> Batch:
        return Batch(*tensors)

    def _row(self, entry: Numbers, position: int) -> tuple[Numbers, Numbers]:
        """Inputs and targets of one example."""
        tokens = self._examples.tokens[entry[START] : entry[START] + entry[LENGTH]].astype(np.int64)
        if self._task == "causal":
            tokens = tokens[: self.sequence_length + 1]
            targets = tokens[1:].copy()
            targets[: max(0, entry[DETAIL] - 1)] = IGNORED
            return tokens[:-1], targets
        if len(tokens) > self.sequence_length:
            tokens = np.concatenate([tokens[: self.sequence_length - 1], tokens[-1:]])
        return self._mask(tokens, position) if self._task == "masked" else (tokens, tokens)

    def _mask(self, tokens: Numbers, position: int) -> tuple[Numbers, Numbers]:
        """The tokens with some of them hidden, and those as targets. Drawn for this position: anew in every epoch."""
        draw = np.random.default_rng((self._seed, position))
        places = 1 + draw.choice(len(tokens) - 2, _masked(len(tokens)), replace=False)
        inputs, targets = tokens.copy(), np.full_like(tokens, IGNORED)
        targets[places] = tokens[places]
        way = draw.random(len(places))
        inputs[places[way < 0.8]] = self.description.mask
        others = places[(way >= 0.8) & (way < 0.9)]
        inputs[others] = draw.integers(self.vocabulary, size=len(others))
        return inputs, targets

    def _padded(self, rows: list[Numbers], padding: int) -> tuple[Tensor, Tensor]:
        """The rows as one tensor, and where they are."""
        width = max(len(row) for row in rows)
        table = np.full((len(rows), width), padding, dtype=np.int64)
        present = np.zeros((len(rows), width), dtype=np.int64)
        for number, row in enumerate(rows):
            table[number, : len(row)] = row
            present[number, : len(row)] = 1
        return torch.from_numpy(table), torch.from_numpy(present)

    def _tell(self, valid: Numbers) -> None:
        """Say what the length costs.

        Raises:
            ConfigError: everything.
        """
        longest = self.sequence_length + (self._task == "causal")
        cut, lost = int((self._examples.entries[:, LENGTH] > longest).sum()), int((valid == 0).sum())
        url, total = self._examples.url, len(valid)
        if lost == total:
            raise ConfigError(
                [
                    f"None of the {total} examples at {url} has anything to learn within {self.sequence_length} tokens. Set "
                    "sequence_length higher."
                ]
            )
        if cut and self._ranks.first:
            print(f"{cut:,} of {total:,} examples at {url} are longer than {longest} tokens and are cut.", file=sys.stderr)
        if lost and self._ranks.first:
            print(
                f"WARNING: {lost:,} of {total:,} examples at {url} have nothing to learn within {self.sequence_length} tokens "
                "(the prompt alone is as long) and are left out.",
                file=sys.stderr,
            )


def _valid_targets(entries: Numbers, task: Task, sequence_length: int) -> Numbers:
    """How many valid targets each example has."""
    if task == "classification":
        return np.ones(len(entries), dtype=np.int64)
    if task == "causal":
        seen = np.minimum(entries[:, LENGTH], sequence_length + 1)
        learnt: Numbers = np.maximum(0, seen - np.maximum(1, entries[:, DETAIL]))
        return learnt
    guessed: Numbers = _masked(np.minimum(entries[:, LENGTH], sequence_length))
    return guessed


def _masked(lengths: Any) -> Any:
    """How many tokens of a text are to be guessed: never the first or the last, which the tokenizer puts around it."""
    between = np.maximum(0, lengths - 2)
    return np.where(between > 0, np.maximum(1, np.round(MASKED_SHARE * between)), 0).astype(np.int64)


def _check_task(examples: Examples, task: Task) -> None:
    kind = examples.description.kind
    if (task == "classification") != (kind == "labelled"):
        have = "a class each" if kind == "labelled" else "no classes"
        fits = "'classification'" if kind == "labelled" else "'causal' or 'masked'"
        raise ConfigError([f"The examples at {examples.url} have {have}, so finetune.task cannot be {task!r}. Allowed: {fits}."])
    if task == "masked" and examples.description.mask < 0:
        raise ConfigError([f"The tokenizer of the examples at {examples.url} has no mask token, which 'masked' needs."])


def _check_share(batch: int, world: int) -> None:
    if batch % world:
        worlds = ", ".join(str(n) for n in range(1, min(batch, 64) + 1) if batch % n == 0)
        raise ConfigError(
            [
                f"A batch of {batch} examples does not divide among {world} ranks. Allowed numbers of ranks: {worlds}. "
                f"Or set batch_examples to {max(1, round(batch / world)) * world}."
            ]
        )
