"""Text to tokens for examples: the bundled bytes, or a Hugging Face tokenizer."""

from __future__ import annotations

import abc
import hashlib
from pathlib import Path
from typing import Any

from trainrun.config import ConfigError
from trainrun.data.write import END_OF_DOCUMENT, VOCABULARY

BYTES = "bytes"


class Tokenizer(abc.ABC):
    """What turns text into token ids.

    Attributes:
        name: "bytes", or a digest of the tokenizer's content: the same name gives the same tokens.
        vocabulary: ids are below it.
        padding: the id that fills short sequences.
        mask: the id that stands for a masked token; -1 when there is none.
    """

    name: str
    vocabulary: int
    padding: int
    mask: int = -1

    @abc.abstractmethod
    def whole(self, text: str) -> list[int]:
        """A text from its beginning to its end, with the marks of both that the tokenizer has."""

    @abc.abstractmethod
    def continued(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        """A prompt with the mark of a beginning, and what is to follow with that of an end."""


class ByteTokenizer(Tokenizer):
    """The tokens of `trainrun.data.write`: a byte each, and one more that ends a text and pads."""

    name = BYTES
    vocabulary = VOCABULARY
    padding = END_OF_DOCUMENT

    def whole(self, text: str) -> list[int]:
        return [*text.encode(), END_OF_DOCUMENT]

    def continued(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        return list(prompt.encode()), self.whole(completion)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer as transformers loads it. Where its template ends no text, its end-of-text token (eos) is added.

    Raises:
        ConfigError: there is none in the folder, or nothing marks the end of a text.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_tokenizer(folder)
        text = self._tokenizer.backend_tokenizer.to_str() if self._tokenizer.is_fast else str(self._tokenizer.get_vocab())
        self.name = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
        self.vocabulary = len(self._tokenizer)
        template = self._tokenizer("a").input_ids
        bare = self._tokenizer("a", add_special_tokens=False).input_ids
        start = next((i for i in range(len(template)) if template[i : i + len(bare)] == bare), 0)
        self._before, self._after = template[:start], template[start + len(bare) :]
        if not self._after:
            if self._tokenizer.eos_token_id is None:
                raise ConfigError([f"The tokenizer in {folder} has no eos_token, so that nothing would mark a text's end."])
            self._after = [self._tokenizer.eos_token_id]
        pad = self._tokenizer.pad_token_id
        self.padding = self._after[-1] if pad is None else pad
        self.mask = -1 if self._tokenizer.mask_token_id is None else self._tokenizer.mask_token_id

    def whole(self, text: str) -> list[int]:
        return [*self._before, *self._bare(text), *self._after]

    def continued(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        return [*self._before, *self._bare(prompt)], [*self._bare(completion), *self._after]

    def _bare(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids


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
