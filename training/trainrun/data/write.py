"""From text files to a token dataset, by a tokenizer, whose end-of-text token ends each document.

The same files give the same dataset, byte for byte, wherever it is made: documents are known by their path inside
their source, read in the order of these names, and put into a split by the digest of their name.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from trainrun.config import ConfigError
from trainrun.data.cache import file_digest
from trainrun.data.dataset import DESCRIPTION, HELD_OUT, TRAIN, Described, Description, Split
from trainrun.data.tokenizer import ByteTokenizer, Tokenizer
from trainrun.store import StoreKeyMissing, open_store


@dataclass(frozen=True)
class Document:
    """One text file."""

    name: str
    path: Path
    size: int


def find_documents(sources: Sequence[str], *, pattern: str = "**/*") -> list[Document]:
    """The files to read: each source is a file, or a directory of which the files that match ``pattern`` are taken.

    Raises:
        ConfigError: a source that does not exist, or nothing found.
    """
    documents = []
    for number, source in enumerate(sources):
        top = Path(source)
        if not top.exists():
            raise ConfigError([f"{source} does not exist."])
        paths = [top] if top.is_file() else [p for p in top.glob(pattern) if p.is_file()]
        for path in paths:
            name = path.name if top.is_file() else path.relative_to(top).as_posix()
            documents.append(Document(f"{number}/{name}", path, path.stat().st_size))
    if not sum(d.size for d in documents):
        raise ConfigError([f"No text was found in {', '.join(sources)} (pattern {pattern!r})."])
    return sorted(documents, key=lambda d: d.name)


def split_documents(documents: Sequence[Document], held_out: float) -> dict[str, list[Document]]:
    """Whole files go to the held-out split, drawn by the digest of their names, until it has its share of the bytes.

    Raises:
        ConfigError: a share that leaves one of the two without a file.
    """
    if not 0 <= held_out < 1:
        raise ConfigError([f"held-out is {held_out}. Allowed: 0 (none) to less than 1."])
    if held_out == 0:
        return {TRAIN: list(documents)}
    wanted = held_out * sum(d.size for d in documents)
    drawn: set[str] = set()
    size = 0
    for document in sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest()):
        if size >= wanted:
            break
        drawn.add(document.name)
        size += document.size
    splits = {
        TRAIN: [d for d in documents if d.name not in drawn],
        HELD_OUT: [d for d in documents if d.name in drawn],
    }
    if not splits[TRAIN]:
        raise ConfigError(
            [f"Holding out {held_out:.0%} of {len(documents)} files leaves none to train on. Give more, smaller files."]
        )
    return splits


def write_dataset(
    documents: Sequence[Document],
    url: str,
    *,
    tokenizer: Tokenizer | None = None,
    held_out: float = 0.05,
    progress: Callable[[int], None] = lambda size: None,
) -> Description:
    """Tokenize ``documents`` and write the dataset to ``url``, a directory or ``s3://bucket/prefix``.

    Args:
        documents: from `find_documents`.
        url: where. What lies there already must be this very dataset.
        tokenizer: bytes by default. The description holds its name and its vocabulary.
        held_out: share of the bytes kept from training, for evaluation; 0 makes no such split.
        progress: told the bytes of each document when it is done.

    Raises:
        ConfigError: another dataset is there, the files cannot be split or are not UTF-8 where the tokenizer needs it, or the
            tokenizer has no token that ends a document.
    """
    tokenizer = tokenizer or ByteTokenizer()
    if tokenizer.end < 0:
        raise ConfigError(["The tokenizer has no eos_token, so that nothing would end a document. Name one that has."])
    dtype = _smallest_dtype(tokenizer.vocabulary)
    splits: dict[str, Split] = {}
    with tempfile.TemporaryDirectory(prefix="trainrun-tokens-") as directory:
        paths = {}
        for name, members in split_documents(documents, held_out).items():
            path = Path(directory, name)
            splits[name] = _write_split(path, name, members, tokenizer, dtype, progress)
            paths[splits[name].file] = path
        description = Description(
            tokenizer=tokenizer.name, vocabulary=tokenizer.vocabulary, dtype=dtype, splits=splits
        ).with_fingerprint()
        publish(url, DESCRIPTION, description, paths)
    return description


def publish(url: str, name: str, description: Described, files: Mapping[str, Path]) -> None:
    """Put a dataset's files in their place, and the document ``name`` that describes them after all of them.

    Raises:
        ConfigError: another dataset is there.
    """
    store = open_store(url)
    document = description.to_json().encode()
    try:
        there = store.get(name)
    except StoreKeyMissing:
        there = document
    if there != document:
        raise ConfigError([f"{url} holds another dataset. Name another place, or delete that one first."])
    for file, path in files.items():
        store.put_file(file, path)
    store.put(name, document)


def _smallest_dtype(vocabulary: int) -> Literal["uint16", "uint32"]:
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def _write_split(
    path: Path,
    name: str,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    dtype: str,
    progress: Callable[[int], None],
) -> Split:
    kind = np.dtype(dtype).newbyteorder("<")
    tokens = size = 0
    with path.open("wb") as file:
        for document in documents:
            text = document.path.read_bytes()
            try:
                found = tokenizer.document(text)
            except UnicodeDecodeError as error:
                raise ConfigError(
                    [f"{document.path} is not UTF-8 (byte {error.start}). Leave it out, or write it anew in UTF-8."]
                ) from None
            file.write(found.astype(kind).tobytes())
            tokens += len(found)
            size += len(text)
            progress(len(text))
    digest = file_digest(path)
    return Split(file=f"{name}-{digest[:16]}.bin", sha256=digest, tokens=tokens, documents=len(documents), bytes=size)
