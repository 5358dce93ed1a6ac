"""Held-out bits per byte: of a model, and of the unigram and bigram models of the same training text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainrun.checkpoint.layout import Commit
from trainrun.checkpoint.parts import whole
from trainrun.checkpoint.read import kinds, load_into
from trainrun.checkpoint.tensors import model_tensors
from trainrun.config import ConfigError, from_mapping
from trainrun.data.batch import IGNORED, Batch
from trainrun.data.tokenizer import BYTES
from trainrun.models.gpt import GPT
from trainrun.settings import TrainSettings
from trainrun.store import Store

Tokens = np.ndarray[Any, np.dtype[Any]]

WINDOWS_PER_BATCH = 32
LOGITS_AT_ONCE = 2**28
"""Of all windows of a batch, where this leaves at least one: 1 GiB in fp32."""
PAIRS_AT_ONCE = 2**24
"""Pairs of tokens that are sorted together."""


@dataclass(frozen=True)
class NGrams:
    """Bits per byte of the two counting models."""

    unigram: float
    bigram: float


def restore_gpt(store: Store, commit: Commit) -> GPT:
    """The bundled GPT as a commit holds it.

    Raises:
        ConfigError: the run trained another model.
        Damaged: the checkpoint is not what was written.
    """
    settings = from_mapping(TrainSettings, commit.settings, source=f"the checkpoint of step {commit.step}")
    there = kinds(commit)
    embedding = there.get("model/embedding.weight")
    context = commit.data.get("sequence_length", settings.sequence_length)
    gpt = GPT(settings.model, vocabulary=1 if embedding is None else embedding.shape[0], context=context)
    targets = model_tensors(gpt)
    shapes = {name: kind.shape for name, kind in there.items() if name.startswith("model/")}
    if shapes != {name: tensor.shape for name, tensor in targets.items()}:
        raise ConfigError([f"The checkpoint of step {commit.step} is not of the bundled GPT with its recorded settings."])
    load_into([whole(name, tensor) for name, tensor in targets.items()], store, commit)
    return gpt.eval()


def tokenizer_name(commit: Commit) -> str:
    """That of the tokens on which a commit's model was trained; bytes where none is recorded, since there was no other then."""
    return str(commit.data.get("tokenizer", BYTES))


def bits_per_byte(gpt: GPT, tokens: Tokens, *, text_bytes: int, progress: Callable[[float], None] = lambda share: None) -> float:
    """The model's bits for all but the first of ``tokens``, by the bytes of text that they stand for.

    Windows overlap by half, and of each but the first only the later half counts, so that every token is predicted
    once, from at least half a context.
    """
    stride = max(1, gpt.context // 2)
    windows = [_window(tokens, start, gpt.context, stride) for start in range(0, max(1, len(tokens) - 1 - stride), stride)]
    at_once = min(WINDOWS_PER_BATCH, max(1, LOGITS_AT_ONCE // (gpt.context * gpt.embedding.weight.shape[0])))
    nats = 0.0
    with torch.no_grad():
        for first in range(0, len(windows), at_once):
            inputs, targets = zip(*windows[first : first + at_once], strict=True)
            nats += float(gpt.loss(Batch(torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets)))))
            progress(min(1.0, (first + at_once) / len(windows)))
    return nats / math.log(2) / text_bytes


def count_models(train: Tokens, held_out: Tokens, *, vocabulary: int, text_bytes: int) -> NGrams:
    """Unigram (one is added to each count) and bigram models of ``train`` on all but the first of ``held_out``.

    The bigram falls back on the unigram as far as its context is new (Witten and Bell 1991): with c tokens of t kinds
    seen after a, p(b | a) = (count(a, b) + t p(b)) / (c + t).
    """
    pairs, times = _count_pairs(train, vocabulary)
    followed = np.bincount(pairs // vocabulary, weights=times, minlength=vocabulary)
    counts = followed + 1
    counts[train[-1]] += 1  # nothing follows the last token
    unigram = counts / counts.sum()
    kinds = np.maximum(1, np.bincount(pairs // vocabulary, minlength=vocabulary))  # never seen: nothing but the unigram
    before, after = held_out[:-1].astype(np.int64), held_out[1:].astype(np.int64)
    wanted = before * vocabulary + after
    places = np.searchsorted(pairs, wanted)
    seen = np.where(np.append(pairs, -1)[places] == wanted, np.append(times, 0)[places], 0)
    bigram = (seen + kinds[before] * unigram[after]) / (followed[before] + kinds[before])
    return NGrams(unigram=float(-np.log2(unigram[after]).sum() / text_bytes), bigram=float(-np.log2(bigram).sum() / text_bytes))


def _count_pairs(tokens: Tokens, vocabulary: int) -> tuple[Tokens, Tokens]:
    """The pairs (a, b) of neighbours that occur, as a x ``vocabulary`` + b in ascending order, and how often each does.

    A table of all pairs would not fit into memory where tokens are parts of words; those that occur do.
    """
    pairs, times = np.empty(0, np.int64), np.empty(0, np.int64)
    for start in range(0, len(tokens) - 1, PAIRS_AT_ONCE):
        part = tokens[start : start + PAIRS_AT_ONCE + 1].astype(np.int64)
        more, more_times = np.unique(part[:-1] * vocabulary + part[1:], return_counts=True)
        both = np.concatenate([pairs, more])
        pairs, places = np.unique(both, return_inverse=True)
        times = np.bincount(places, weights=np.concatenate([times, more_times])).astype(np.int64)
    return pairs, times


def _window(tokens: Tokens, start: int, context: int, stride: int) -> tuple[Tokens, Tokens]:
    """Inputs and targets from ``start``, padded to the context; targets that count elsewhere or nowhere are ignored."""
    part = tokens[start : start + context + 1].astype(np.int64)
    inputs, targets = np.zeros(context, np.int64), np.full(context, IGNORED, np.int64)
    inputs[: len(part) - 1] = part[:-1]
    targets[: len(part) - 1] = part[1:]
    if start:
        targets[: context - stride] = IGNORED
    return inputs, targets
