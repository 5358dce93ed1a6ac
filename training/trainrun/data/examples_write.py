"""From files of JSON lines to a dataset of examples, tokenized once.

A line is ``{"prompt": ..., "completion": ...}`` (the completion is learnt), ``{"text": ...}`` (all of it is) or
``{"text": ..., "label": ...}`` (its class is). Files of one dataset hold either classes or none.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trainrun.config import ConfigError
from trainrun.data.cache import file_digest
from trainrun.data.examples import EXAMPLES, ExamplesDescription
from trainrun.data.tokenizer import Tokenizer
from trainrun.data.write import Document, publish

MOST_PROBLEMS = 20
"""Bad lines that are named; there may be millions."""

_SHAPES = ({"prompt", "completion"}, {"text"}, {"text", "label"})


@dataclass(frozen=True)
class Line:
    """One example, as it was read."""

    prompt: str
    """Empty where there is none."""
    text: str
    label: str | int | None


def write_examples(
    documents: Sequence[Document], tokenizer: Tokenizer, url: str, *, progress: Callable[[int], None] = lambda size: None
) -> ExamplesDescription:
    """Tokenize the lines of ``documents``, in their order, and write the dataset to ``url``.

    Args:
        documents: from `trainrun.data.write.find_documents`.
        tokenizer: that of the model to be fine-tuned.
        url: a directory or ``s3://bucket/prefix``. What lies there already must be this very dataset.
        progress: told the bytes of each document when it is done.

    Raises:
        ConfigError: lines that are no examples, all named; examples with and without labels; another dataset is there.
    """
    with tempfile.TemporaryDirectory(prefix="trainrun-examples-") as directory:
        tokens_path, entries_path = Path(directory, "tokens"), Path(directory, "entries")
        with tokens_path.open("wb") as file:
            entries, labels = _tokenize(documents, tokenizer, file, progress)
        classes, numbers = _number(labels)
        if labels:
            entries[:, 2] = numbers
        entries_path.write_bytes(entries.astype("<i8").tobytes())
        digests = [file_digest(path) for path in (tokens_path, entries_path)]
        files = {f"tokens-{digests[0][:16]}.bin": tokens_path, f"entries-{digests[1][:16]}.bin": entries_path}
        tokens_file, entries_file = files
        description = ExamplesDescription(
            tokenizer=tokenizer.name,
            vocabulary=tokenizer.vocabulary,
            padding=tokenizer.padding,
            mask=tokenizer.mask,
            kind="labelled" if labels else "text",
            classes=classes,
            examples=len(entries),
            tokens=int(entries[:, 1].sum()),
            tokens_file=tokens_file,
            tokens_sha256=digests[0],
            entries_file=entries_file,
            entries_sha256=digests[1],
        ).with_fingerprint()
        publish(url, EXAMPLES, description, files)
    return description


def _tokenize(
    documents: Sequence[Document], tokenizer: Tokenizer, file: BinaryIO, progress: Callable[[int], None]
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], list[str | int]]:
    """Write all tokens to ``file``; the entries, and the labels if the lines have any."""
    entries: list[tuple[int, int, int]] = []
    labels: list[str | int] = []
    problems = _Problems()
    start = 0
    for document in documents:
        for line in _lines(document, problems):
            before, after = tokenizer.continued(line.prompt, line.text) if line.prompt else ([], tokenizer.whole(line.text))
            np.array([*before, *after], dtype="<u4").tofile(file)
            entries.append((start, len(before) + len(after), len(before)))
            start += len(before) + len(after)
            if line.label is not None:
                labels.append(line.label)
        progress(document.size)
    if not entries and not problems.found:
        raise ConfigError([f"There are no lines in {', '.join(str(d.path) for d in documents)}."])
    if labels and len(labels) < len(entries):
        problems.add(f"{len(labels)} of the {len(entries)} examples have a label, the others none. Allowed: all or none of them.")
    if len({type(label) for label in labels}) > 1:
        problems.add("Some labels are names and some are numbers. Allowed: all of them one or the other.")
    problems.end()
    return np.array(entries, dtype=np.int64), labels


def _lines(document: Document, problems: _Problems) -> Iterator[Line]:
    with document.path.open(encoding="utf-8", errors="strict") as file:
        number = 0
        try:
            for number, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                line = _parse(text)
                if isinstance(line, str):
                    problems.add(f"{document.path}, line {number}: {line}")
                else:
                    yield line
        except UnicodeDecodeError as error:
            problems.add(f"{document.path}, line {number + 1} or soon after: not UTF-8 ({error.reason}).")


def _parse(text: str) -> Line | str:
    """The example on a line, or what is wrong with it."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        return f"not JSON ({error.msg} at column {error.colno})."
    if not isinstance(content, dict) or set(content) not in _SHAPES:
        found = ", ".join(content) or "nothing" if isinstance(content, dict) else type(content).__name__
        return f"has {found}. Allowed: prompt and completion; text; or text and label."
    labelled = "label" in content
    label = content.pop("label", None)
    if labelled and (isinstance(label, bool) or not isinstance(label, (str, int)) or (isinstance(label, int) and label < 0)):
        return f"label is {json.dumps(label)}. Allowed: a class's name, or its number from 0."
    wrong = [name for name, value in content.items() if not isinstance(value, str)]
    if wrong:
        return f"{wrong[0]} is {content[wrong[0]]!r}. Allowed: text in quotes."
    empty = [name for name, value in content.items() if not value and name != "prompt"]
    if empty:
        return f"{empty[0]} is empty, so that there is nothing to learn."
    learnt: str = content["completion"] if "completion" in content else content["text"]
    return Line(content.get("prompt", ""), learnt, label)


def _number(labels: Sequence[str | int]) -> tuple[tuple[str, ...], list[int]]:
    """The names of the classes, and the number of each example's."""
    if all(isinstance(label, int) for label in labels):
        numbers = [int(label) for label in labels]
        return tuple(str(number) for number in range(max(numbers, default=-1) + 1)), numbers
    classes = tuple(sorted({str(label) for label in labels}))
    number_of = {name: number for number, name in enumerate(classes)}
    return classes, [number_of[str(label)] for label in labels]


class _Problems:
    """Collects what is wrong, and raises it at the end."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._more = 0

    def add(self, problem: str) -> None:
        if len(self.found) < MOST_PROBLEMS:
            self.found.append(problem)
        else:
            self._more += 1

    def end(self) -> None:
        if self._more:
            self.found.append(f"{self._more} more lines are wrong.")
        if self.found:
            raise ConfigError(self.found)
