"""One mapping of a DeepSpeed file, read key by key: what is not read in the end is unknown."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

AUTO = "auto"
"""What Hugging Face's tools write for "as the trainer's own settings say"."""

Kind = Callable[[Any], Any]
"""Turns a value of JSON into that of Python, or raises ValueError with what is allowed."""


def whole(least: int) -> Kind:
    """A whole number, also written as 5e8."""

    def convert(value: Any) -> int:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value != int(value) or value < least:
            raise ValueError(f"a whole number, {least} or more")
        return int(value)

    return convert


def number(least: float, *, below: float = math.inf, above: bool = False) -> Kind:
    """A number from ``least`` (or only ``above`` it) to less than ``below``."""

    def convert(value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < least or value >= below or (above and value == least):
            bound = f"more than {least:g}" if above else f"{least:g} or more"
            raise ValueError(f"a number, {bound}" + (f" and less than {below:g}" if below < math.inf else ""))
        return float(value)

    return convert


def flag(value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def text(value: Any) -> str:
    """Any text."""
    if not isinstance(value, str):
        raise ValueError("text")
    return value


def one_of(*choices: Any) -> Kind:
    """One of a few values, of the same type."""

    def convert(value: Any) -> Any:
        if any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices):
            return value
        raise ValueError(" or ".join(map(repr, choices)))

    return convert


def mapping(value: Any) -> Mapping[str, Any]:
    """A block."""
    if not isinstance(value, Mapping):
        raise ValueError("a mapping")
    return value


def texts(value: Any) -> list[str]:
    """A list of texts; DeepSpeed takes a single one for a list of it."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("a list of texts")
    return value


class Section:
    """A mapping at a path of the file.

    Args:
        problems: receives a sentence for each thing that is wrong.
    """

    def __init__(self, content: Mapping[str, Any], path: str, problems: list[str]) -> None:
        self.path = path
        self.problems = problems
        self._content = content
        self._known: set[str] = set()

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    def where(self, name: str) -> str:
        """The path of a key."""
        return f"{self.path}.{name}"

    def named(self, *names: str) -> str:
        """Which of a key's spellings the file uses, the first where it uses none."""
        return next((name for name in names if name in self._content), names[0])

    def take(self, kind: Kind, *names: str, auto: bool = False) -> Any:
        """The value of a key: None when it is missing, null or wrong, `AUTO` when it says so and ``auto`` allows it.

        Args:
            names: its spellings, the usual one first.
        """
        self._known.update(names)
        given = [name for name in dict.fromkeys(names) if self._content.get(name) is not None]
        if len(given) > 1:
            self.problems.append(f"{self.where(given[0])} and {self.where(given[1])} are the same setting. Remove one of them.")
            return None
        if not given:
            return None
        value = self._content[given[0]]
        if value == AUTO and auto:
            return AUTO
        try:
            return kind(value)
        except ValueError as error:
            allowed = f"{error}, or 'auto'" if auto else f"{error}"
            advice = (
                " Nothing here says what 'auto' would be; without the key DeepSpeed's default holds." if value == AUTO else ""
            )
            self.problems.append(f"{self.where(given[0])} is {value!r}. Allowed: {allowed}.{advice}")
            return None

    def section(self, *names: str) -> Section | None:
        """The mapping under a key, None when there is none."""
        content = self.take(mapping, *names)
        return None if content is None else Section(content, self.where(self.named(*names)), self.problems)

    def refuse(self, name: str, advice: str) -> None:
        """Say that a key is not supported, unless it switches itself off (false, null, ``enabled: false``, empty)."""
        self._known.add(name)
        value = self._content.get(name)
        inert = value.get("enabled") in (False, AUTO) if isinstance(value, Mapping) else value in (False, AUTO, 0)
        if value and not inert:
            shown = value if not isinstance(value, (Mapping, list)) else "set"
            self.problems.append(f"{self.where(name)} is {shown!r}, which trainrun does not support. {advice}")

    def ignore(self, *names: str) -> None:
        """Let keys be there that mean nothing to the outcome."""
        self._known.update(names)

    def finish(self) -> None:
        """Name the keys that nobody asked for."""
        for name in self._content:
            if name not in self._known:
                near = difflib.get_close_matches(str(name), self._known, n=1, cutoff=0.7)
                hint = f"Did you mean {near[0]!r}?" if near else "Remove it, or see docs/deepspeed.md for what is understood."
                self.problems.append(f"{self.where(str(name))} is no key of DeepSpeed that trainrun knows. {hint}")
