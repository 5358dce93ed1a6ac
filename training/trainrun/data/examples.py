"""A dataset of examples: one file of tokens, one with an entry for each example, and ``examples.json``, written last.

Like token datasets (`trainrun.data.dataset`) the files are plain little-endian arrays, named by their digest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from trainrun.data.cache import cached
from trainrun.data.dataset import SCHEMA_VERSION, Described, map_tokens, read_description
from trainrun.store import Store

EXAMPLES = "examples.json"

START, LENGTH, DETAIL = range(3)
"""Columns of an entry: where the example's tokens start, how many there are, and the prompt's length or the class."""


@dataclass(frozen=True, kw_only=True)
class ExamplesDescription(Described):
    """What ``examples.json`` says."""

    tokenizer: str
    """ "bytes", or the digest of the Hugging Face tokenizer that made the tokens."""
    vocabulary: int
    """Token ids are below it."""
    padding: int
    """The id that fills short sequences."""
    mask: int
    """The id that stands for a masked token; -1 when the tokenizer has none."""
    kind: Literal["text", "labelled"]
    """Texts of which all or the part after a prompt is learnt, or texts with a class each."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of their numbers."""
    examples: int
    tokens: int
    tokens_file: str
    tokens_sha256: str
    entries_file: str
    entries_sha256: str
    fingerprint: str = ""
    """Digest of everything else here, the files' digests included."""
    schema: int = field(default=SCHEMA_VERSION)


@dataclass(frozen=True)
class Examples:
    """A dataset of examples, mapped from local files; from S3 they come to the node once."""

    url: str
    description: ExamplesDescription
    tokens: np.ndarray[Any, np.dtype[Any]]
    """All of all examples, one after another."""
    entries: np.ndarray[Any, np.dtype[np.int64]]
    """(examples, 3): see `START`."""


def open_examples(url: str) -> Examples:
    """Read the dataset at ``url`` (a directory or ``s3://bucket/prefix``).

    Raises:
        ConfigError: there is none, it is not one of ours, or a file has not the length that the description says.
    """
    store, description = read_description(ExamplesDescription, url, EXAMPLES, command="examples FILES")
    tokens = _map(store, description.tokens_file, description.tokens_sha256, "uint32", description.tokens)
    entries = _map(store, description.entries_file, description.entries_sha256, "int64", 3 * description.examples)
    return Examples(store.url, description, tokens, entries.reshape(-1, 3))


def _map(store: Store, file: str, sha256: str, dtype: str, count: int) -> np.ndarray[Any, np.dtype[Any]]:
    return map_tokens(cached(store, file, sha256=sha256), dtype=dtype, count=count)
