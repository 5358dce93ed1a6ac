"""A token dataset: one file of tokens for each split, and ``dataset.json``, which is written last and describes them.

The files are plain arrays without a header, little-endian, named by their digest and never overwritten. Whoever has
the description can therefore map a file and check that it is the right one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from trainrun.config import ConfigError, from_mapping, to_mapping
from trainrun.data.cache import cached
from trainrun.store import Store, StoreKeyMissing, open_store

DESCRIPTION = "dataset.json"
SCHEMA_VERSION = 1

TRAIN, HELD_OUT = "train", "held-out"


class Described:
    """What the descriptions of all kinds of datasets have in common."""

    fingerprint: str
    schema: int

    def with_fingerprint(self: AnyDescription) -> AnyDescription:
        """The same description with the fingerprint that belongs to it."""
        content = {**to_mapping(self), "fingerprint": ""}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return type(self)(**{**self.__dict__, "fingerprint": digest})

    def to_json(self) -> str:
        """The document, the same bytes for the same description."""
        return json.dumps(to_mapping(self), sort_keys=True, indent=1) + "\n"


AnyDescription = TypeVar("AnyDescription", bound=Described)


@dataclass(frozen=True, kw_only=True)
class Split:
    """One file of tokens."""

    file: str
    sha256: str
    tokens: int
    documents: int
    bytes: int
    """Bytes of text for which the tokens stand; separators between documents are none."""


@dataclass(frozen=True, kw_only=True)
class Description(Described):
    """What ``dataset.json`` says."""

    tokenizer: str
    """Its name: see `trainrun.data.tokenizer.Tokenizer`."""
    vocabulary: int
    """Token ids are below it."""
    dtype: Literal["uint8", "uint16", "uint32"]
    splits: dict[str, Split]
    fingerprint: str = ""
    """Digest of everything else here, the files' digests included: two datasets are the same when it is the same."""
    schema: int = field(default=SCHEMA_VERSION)


@dataclass(frozen=True)
class Dataset:
    """A dataset that was found and whose description was checked; tokens are fetched by `tokens`."""

    store: Store
    description: Description

    def split(self, name: str) -> Split:
        """The entry of one split.

        Raises:
            ConfigError: the dataset has no such split.
        """
        if name not in self.description.splits:
            have = ", ".join(self.description.splits)
            raise ConfigError([f"The dataset at {self.store.url} has no split {name!r}. It has: {have}."])
        return self.description.splits[name]

    def tokens(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """All tokens of a split, mapped from a local file; from S3 the file comes to the node once.

        Raises:
            ConfigError: no such split, or the file has not the length that the description says.
        """
        split = self.split(name)
        path = cached(self.store, split.file, sha256=split.sha256)
        return map_tokens(path, dtype=self.description.dtype, count=split.tokens)


def open_dataset(url: str) -> Dataset:
    """Read and check the description of the dataset at ``url`` (a directory or ``s3://bucket/prefix``).

    Raises:
        ConfigError: there is none, or it is not one of ours.
    """
    store, description = read_description(Description, url, DESCRIPTION, command="tokens FILES")
    return Dataset(store, description)


def read_description(kind: type[AnyDescription], url: str, file: str, *, command: str) -> tuple[Store, AnyDescription]:
    """Read and check the document ``file`` of the dataset at ``url``.

    Args:
        kind: a dataclass, what the document is to become.
        command: of trainrun, which writes such datasets.

    Raises:
        ConfigError: there is none, or it is not one of ours.
    """
    if not url:
        raise ConfigError([f"No data is named. Set --data to what `python -m trainrun {command} ... --out` wrote."])
    store = open_store(url)
    try:
        text = store.get(file)
    except StoreKeyMissing:
        raise ConfigError(
            [f"There is no dataset at {url} ({file} is missing). Write one: python -m trainrun {command} --out {url}"]
        ) from None
    source = store.locate(file)
    try:
        mapping = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError([f"{source} is not JSON: {error}."]) from None
    description = from_mapping(kind, mapping, source=source)
    if description.schema != SCHEMA_VERSION:
        raise ConfigError([f"{source} has schema {description.schema}, this trainrun reads {SCHEMA_VERSION}."])
    if description.with_fingerprint() != description:
        raise ConfigError([f"{source} was changed: its fingerprint is not that of its content. Write the dataset anew."])
    return store, description


def map_tokens(path: Path, *, dtype: str, count: int) -> np.ndarray[Any, np.dtype[Any]]:
    """The file as a read-only array of ``count`` tokens.

    Raises:
        ConfigError: there is no such file, or it has another length.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    if not path.is_file():
        raise ConfigError([f"{path} is missing, though its dataset names it. Write the dataset anew."])
    expected, found = count * kind.itemsize, path.stat().st_size
    if found != expected:
        raise ConfigError([f"{path} has {found} bytes, its description says {expected}. Write the dataset anew."])
    return np.memmap(path, dtype=kind, mode="r")
