"""``trainrun evaluate``: held-out bits per byte of a checkpoint, beside unigram and bigram models of the same text."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from trainrun.config import ConfigError
from trainrun.store import open_store


def add_to(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("evaluate", help="held-out bits per byte of the newest good checkpoint")
    parser.add_argument(
        "--checkpoint", required=True, metavar="LOCATION/RUN", help="the run's folder: a directory or an s3:// URL"
    )
    parser.add_argument("--data", required=True, metavar="URL", help="the token dataset that it was trained on")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(act=act)


def act(options: argparse.Namespace) -> int:
    """Evaluate."""
    from trainrun.checkpoint.digest import model_digest
    from trainrun.checkpoint.read import newest_good
    from trainrun.data.dataset import HELD_OUT, TRAIN, open_dataset
    from trainrun.evaluation import bits_per_byte, count_models, restore_gpt, tokenizer_name

    started = time.monotonic()
    store = open_store(options.checkpoint)
    commit, gpt = newest_good(store, lambda commit: restore_gpt(store, commit), warn=_warn)
    dataset = open_dataset(options.data)
    if tokenizer_name(commit) != dataset.description.tokenizer:
        raise ConfigError(
            [
                f"The checkpoint was trained on tokens of {tokenizer_name(commit)}, {options.data} holds those of "
                f"{dataset.description.tokenizer}: the same ids mean other text. Name a dataset of the same tokenizer."
            ]
        )
    if commit.data.get("fingerprint") != dataset.description.fingerprint:
        _warn(f"The checkpoint was trained on another dataset than {options.data}: its held-out text may have been trained on.")
    split, held_out = dataset.split(HELD_OUT), dataset.tokens(HELD_OUT)
    ngrams = count_models(dataset.tokens(TRAIN), held_out, vocabulary=dataset.description.vocabulary, text_bytes=split.bytes)
    model = bits_per_byte(gpt, held_out, text_bytes=split.bytes, progress=_progress)
    result = {
        "step": commit.step,
        "model_sha256": model_digest(gpt),
        "tokens": commit.tokens,
        "held_out_bytes": split.bytes,
        "model_bits_per_byte": model,
        "unigram_bits_per_byte": ngrams.unigram,
        "bigram_bits_per_byte": ngrams.bigram,
        "seconds": round(time.monotonic() - started, 2),
    }
    if options.json:
        print(json.dumps(result))
        return 0
    print(f"Held-out bits per byte ({split.bytes:,} bytes), checkpoint of step {commit.step}:")
    for name in ("unigram", "bigram", "model"):
        print(f"  {name:8} {result[f'{name}_bits_per_byte']:.3f}")
    return 0


def _warn(text: str) -> None:
    print(f"WARNING: {text}", file=sys.stderr)


def _progress(share: float) -> None:
    if sys.stderr.isatty():
        print(f"\r{share:4.0%} evaluated", end="\n" if share >= 1 else "", file=sys.stderr, flush=True)
