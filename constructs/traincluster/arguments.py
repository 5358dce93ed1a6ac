"""Arguments of the wrong kind, told as sentences: Python checks no types, and what goes wrong later names no argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aws_cdk import aws_s3 as s3

_KINDS: dict[type, str] = {int: "a whole number", str: "text", s3.BucketBase: "a bucket construct"}


@dataclass(frozen=True)
class Argument:
    """One argument of a construct and what it has to be."""

    name: str
    value: Any
    kind: type
    advice: str
    """How to give it right, as a sentence."""
    optional: bool = False
    """Whether None is allowed."""

    @property
    def problem(self) -> str | None:
        """What is wrong with it, in a sentence; None when nothing is."""
        if self.value is None and self.optional:
            return None
        # bool is an int to Python, and nobody who writes nodes=True means one node
        if isinstance(self.value, self.kind) and not (self.kind is int and isinstance(self.value, bool)):
            return None
        wanted = _KINDS.get(self.kind, f"a {self.kind.__name__}")
        given = repr(self.value) if isinstance(self.value, (str, int, float, type(None))) else f"a {type(self.value).__name__}"
        return f"{self.name} is {given}. Allowed: {wanted}{' or None' if self.optional else ''}. {self.advice}"


def check_arguments(*arguments: Argument) -> None:
    """Check the kinds of a construct's arguments.

    Raises:
        ValueError: with one sentence for each that is wrong.
    """
    problems = [argument.problem for argument in arguments if argument.problem]
    if problems:
        raise ValueError("\n".join(problems))
