"""Text to tokens and back: bytes, or a Hugging Face tokenizer.

At byte level a token is a byte, and one more token ends each text.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.config import ConfigError

BYTES = "bytes"

END_OF_DOCUMENT = 256
VOCABULARY = 257

Tokens = np.ndarray[tuple[int], np.dtype[Any]]


class Tokenizer(abc.ABC):
    """What turns text into token ids.

    Attributes:
        name: "bytes", or a digest of the tokenizer's content: the same name gives the same tokens.
        vocabulary: ids are below it.
        padding: the id that fills short sequences.
        mask: the id that stands for a masked token; -1 when there is none.
        end: the id that ends a document; -1 when there is none.
    """

    name: str
    vocabulary: int
    padding: int
    mask: int = -1
    end: int = -1

    @abc.abstractmethod
    def whole(self, text: str) -> list[int]:
        """A text from its beginning to its end, with the marks of both that the tokenizer has."""

    @abc.abstractmethod
    def continued(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        """A prompt with the mark of a beginning, and what is to follow with that of an end."""

    @abc.abstractmethod
    def document(self, text: bytes) -> Tokens:
        """A document to pretrain on: the mark of a beginning if there is one, the text, and `end`, which there must be.

        Raises:
            UnicodeDecodeError: the tokenizer needs UTF-8, and the text is none.
        """

    @abc.abstractmethod
    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, with their marks in sight."""


class ByteTokenizer(Tokenizer):
    """A byte each, and one more that ends a text and pads."""

    name = BYTES
    vocabulary = VOCABULARY
    padding = END_OF_DOCUMENT
    end = END_OF_DOCUMENT

    def whole(self, text: str) -> list[int]:
        return [*text.encode(), END_OF_DOCUMENT]

    def continued(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        return list(prompt.encode()), self.whole(completion)

    def document(self, text: bytes) -> Tokens:
        return np.append(encode(text), np.uint16(END_OF_DOCUMENT))

    def text(self, tokens: Sequence[int]) -> str:
        return decode(tokens)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer as transformers loads it. Where its template ends no text, its end-of-text token (eos) is added.

    Raises:
        ConfigError: there is none in the folder, or nothing marks the end of a text.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_tokenizer(folder)
        text = self._tokenizer.backend_tokenizer.to_str() if self._tokenizer.is_fast else str(self._tokenizer.get_vocab())
        self.name = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
        self.vocabulary = 1 + max(self._tokenizer.get_vocab().values())
        self.end = -1 if self._tokenizer.eos_token_id is None else self._tokenizer.eos_token_id
        template = self._tokenizer("a").input_ids
        bare = self._tokenizer("a", add_special_tokens=False).input_ids
        start = next((i for i in range(len(template)) if template[i : i + len(bare)] == bare), 0)
        self._before, self._after = template[:start], template[start + len(bare) :]
        if not self._after:
            if self.end < 0:
                raise ConfigError([f"The tokenizer in {folder} has no eos_token, so that nothing would mark a text's end."])
            self._after = [self.end]
        pad = self._tokenizer.pad_token_id
        self.padding = self._after[-1] if pad is None else pad
        self.mask = -1 if self._tokenizer.mask_token_id is None else self._tokenizer.mask_token_id

    def whole(self, text: str) -> list[int]:
        return [*self._before, *self._bare(text), *self._after]

    def continued(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        return [*self._before, *self._bare(prompt)], [*self._bare(completion), *self._after]

    def document(self, text: bytes) -> Tokens:
        return np.array([*self._before, *self._bare(text.decode()), self.end], dtype=np.int64)

    def text(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
        return text

    def _bare(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids


def encode(text: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """The tokens of a text at byte level, without an end."""
    return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)


def decode(tokens: Iterable[int]) -> str:
    """The text of tokens at byte level. An end of a document shows as a form feed; what is not UTF-8, and ids beyond the
    vocabulary, which a model with more rows may give, as replacement characters."""
    text = bytes(0x0C if token == END_OF_DOCUMENT else min(token, 0xFF) for token in tokens)  # 0xFF is never in UTF-8
    return text.decode(errors="replace")


def tokenizer_of(name: str) -> Tokenizer:
    """The tokenizer of that name: "bytes", or the folder of a Hugging Face tokenizer or model.

    Raises:
        ConfigError: there is no such folder, it has no tokenizer, or transformers is not installed.
    """
    return ByteTokenizer() if name == BYTES else HuggingFaceTokenizer(Path(name))


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder of a model has a tokenizer too."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"))


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a folder; see `tokenizer_of`."""
    if not folder.is_dir():
        raise ConfigError([f"There is no folder {folder}. Name that of a model with its tokenizer, or {BYTES!r}."])
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError([f'The tokenizer in {folder} needs transformers: pip install "traincluster[transformers]".']) from None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError([f"{folder} has no tokenizer that transformers can load: {error}"]) from None
