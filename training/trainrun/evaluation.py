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
from trainrun.checkpoint.read import load_into
from trainrun.checkpoint.tensors import model_tensors
from trainrun.config import ConfigError, from_mapping
from trainrun.data.batch import IGNORED, Batch
from trainrun.models.gpt import GPT
from trainrun.settings import TrainSettings
from trainrun.store import Store

Tokens = np.ndarray[Any, np.dtype[Any]]

WINDOWS_PER_BATCH = 32


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
    kinds = commit.kinds()
    embedding = kinds.get("model/embedding.weight")
    context = commit.data.get("sequence_length", settings.sequence_length)
    gpt = GPT(settings.model, vocabulary=1 if embedding is None else embedding.shape[0], context=context)
    targets = model_tensors(gpt)
    there = {name: kind.shape for name, kind in kinds.items() if name.startswith("model/")}
    if there != {name: tensor.shape for name, tensor in targets.items()}:
        raise ConfigError([f"The checkpoint of step {commit.step} is not of the bundled GPT with its recorded settings."])
    load_into([whole(name, tensor) for name, tensor in targets.items()], store, commit)
    return gpt.eval()


def bits_per_byte(gpt: GPT, tokens: Tokens, *, text_bytes: int, progress: Callable[[float], None] = lambda share: None) -> float:
    """The model's bits for all but the first of ``tokens``, by the bytes of text that they stand for.

    Windows overlap by half, and of each but the first only the later half counts, so that every token is predicted
    once, from at least half a context.
    """
    stride = max(1, gpt.context // 2)
    windows = [_window(tokens, start, gpt.context, stride) for start in range(0, max(1, len(tokens) - 1 - stride), stride)]
    nats = 0.0
    with torch.no_grad():
        for first in range(0, len(windows), WINDOWS_PER_BATCH):
            inputs, targets = zip(*windows[first : first + WINDOWS_PER_BATCH], strict=True)
            nats += float(gpt.loss(Batch(torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets)))))
            progress(min(1.0, (first + WINDOWS_PER_BATCH) / len(windows)))
    return nats / math.log(2) / text_bytes


def count_models(train: Tokens, held_out: Tokens, *, vocabulary: int, text_bytes: int) -> NGrams:
    """Unigram (one is added to each count) and bigram models of ``train`` on all but the first of ``held_out``.

    The bigram falls back on the unigram as far as its context is new (Witten and Bell 1991): with c tokens of t kinds
    seen after a, p(b | a) = (count(a, b) + t p(b)) / (c + t).
    """
    counts = np.bincount(train, minlength=vocabulary) + 1.0
    unigram = counts / counts.sum()
    pairs = np.bincount(train[:-1].astype(np.int64) * vocabulary + train[1:], minlength=vocabulary**2)
    pairs = pairs.reshape(vocabulary, vocabulary)
    kinds = (pairs > 0).sum(axis=1, keepdims=True)
    kinds[kinds == 0] = 1  # never seen: nothing but the unigram
    bigram = (pairs + kinds * unigram) / (pairs.sum(axis=1, keepdims=True) + kinds)
    before, after = held_out[:-1], held_out[1:]
    return NGrams(
        unigram=float(-np.log2(unigram[after]).sum() / text_bytes),
        bigram=float(-np.log2(bigram[before, after]).sum() / text_bytes),
    )


def _window(tokens: Tokens, start: int, context: int, stride: int) -> tuple[Tokens, Tokens]:
    """Inputs and targets from ``start``, padded to the context; targets that count elsewhere or nowhere are ignored."""
    part = tokens[start : start + context + 1].astype(np.int64)
    inputs, targets = np.zeros(context, np.int64), np.full(context, IGNORED, np.int64)
    inputs[: len(part) - 1] = part[:-1]
    targets[: len(part) - 1] = part[1:]
    if start:
        targets[: context - stride] = IGNORED
    return inputs, targets
