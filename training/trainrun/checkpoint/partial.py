"""Some of a checkpoint's weights for another model: which of its tensors go where, by their names."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainrun.config import ConfigError
from trainrun.settings.weights import WeightsSettings
from trainrun.store import Store, open_store
from trainrun.words import counted

Kinds = Mapping[str, list[Any]]
"""Of each tensor by name: its type, and its shape as a list."""

MODEL = "model/"
"""Of the names in a checkpoint, before those of parameters and buffers."""

_STEP = re.compile(r"(.+)/step-([0-9]{9,18})/?")
_FLOATING = re.compile(r"b?float.*")


@dataclass(frozen=True)
class LoadedWeights:
    """What was taken of a checkpoint.

    Attributes:
        step: of the checkpoint.
        sources: for each tensor of the model that was loaded, its name in the checkpoint; both begin with "model/".
        missing: names of the model's tensors that were not loaded and keep what they had.
        unexpected: names of selected tensors of the checkpoint that the model has no place for.
    """

    step: int
    sources: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    @property
    def said(self) -> str:
        """In words."""
        more = [counted(len(self.sources), "tensor")]
        if self.missing:
            more.append(f"this model's {_listed(self.missing)} keep what they had")
        if self.unexpected:
            more.append(f"of the checkpoint {_listed(self.unexpected)} are not used")
        return "; ".join(more)


def step_of(url: str) -> tuple[Store, int | None]:
    """The store of a run's folder, and the step when ``url`` names one of its steps: ``LOCATION/RUN/step-000000500``."""
    match = _STEP.fullmatch(url)
    return (open_store(match[1]), int(match[2])) if match else (open_store(url), None)


def matched(here: Kinds, there: Kinds, source: WeightsSettings, *, step: int) -> LoadedWeights:
    """Find a tensor of the checkpoint for each of the model's.

    Args:
        here: the model's tensors; all names begin with "model/".
        there: the checkpoint's.
        source: which are selected, and by what names they go here.
        step: of the checkpoint.

    Raises:
        ConfigError: a pattern or a renaming fits nothing, two tensors would get one name, shapes differ, or ``source.strict``
            and something is missing or left over. Near names are told.
    """
    names = sorted(name.removeprefix(MODEL) for name in there)
    wanted = sorted(name.removeprefix(MODEL) for name in here)
    selected = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in source.select)]
    problems = [
        f"weights.select has {pattern!r}, which no tensor of the checkpoint of step {step} fits. {_near(pattern, names)}"
        for pattern in source.select
        if not fnmatch.filter(names, pattern)
    ]
    problems += [
        f"weights.rename has {old!r}, with which no selected tensor of the checkpoint of step {step} begins. "
        f"{_near(old, selected)}"
        for old in source.rename
        if not any(name.startswith(old) for name in selected)
    ]
    sources: dict[str, str] = {}
    for name in selected:
        new = _renamed(name, source.rename)
        if new in sources:
            problems.append(
                f"Both {sources[new]} and {name} of the checkpoint of step {step} would become {new}. See weights.rename."
            )
        sources[new] = name
    both = {new: old for new, old in sources.items() if new in set(wanted)}
    missing = tuple(name for name in wanted if name not in both)
    unexpected = tuple(old for new, old in sources.items() if new not in both)
    problems += _unlike(here, there, both, step)
    if source.strict:
        advice = "Select, rename, or set weights.strict to false"
        if unexpected:
            problems.append(
                f"The checkpoint of step {step} has what this model lacks: {_listed(unexpected)}. "
                f"{_near(_renamed(unexpected[0], source.rename), missing or wanted)} {advice}."
            )
        if missing and tuple(source.select) == ("*",):
            problems.append(
                f"The checkpoint of step {step} lacks what this model has: {_listed(missing)}. "
                f"{_near(missing[0], unexpected or names)} {advice}."
            )
    if not both and not problems:
        problems.append(f"The checkpoint of step {step} has no tensor of this model's. It has: {_listed(names)}.")
    if problems:
        raise ConfigError(problems)
    return LoadedWeights(step, {MODEL + new: MODEL + old for new, old in both.items()}, missing, unexpected)


def _renamed(name: str, rename: Mapping[str, str]) -> str:
    """With its longest beginning that has another name here replaced."""
    old = max((old for old in rename if name.startswith(old)), key=len, default=None)
    return name if old is None else rename[old] + name[len(old) :]


def _unlike(here: Kinds, there: Kinds, both: Mapping[str, str], step: int) -> list[str]:
    problems = []
    for new, old in both.items():
        (dtype, shape), (dtype_there, shape_there) = here[MODEL + new], there[MODEL + old]
        convertible = dtype == dtype_there or (_FLOATING.fullmatch(dtype) and _FLOATING.fullmatch(dtype_there))
        if shape != shape_there or not convertible:
            problems.append(
                f"{old} is {dtype_there} {shape_there} in the checkpoint of step {step}, {new} is {dtype} {shape} here."
            )
    return problems


def _near(name: str, names: Iterable[str]) -> str:
    """Names like ``name``, or that begin like it; all where there are none."""
    every = list(names)
    stem = name.rstrip("*")
    beginnings = {other[: len(stem)]: other for other in reversed(every)}
    close = difflib.get_close_matches(name, every, n=3, cutoff=0.6)
    close = close or [beginnings[beginning] for beginning in difflib.get_close_matches(stem, beginnings, n=3, cutoff=0.6)]
    return f"Near {name}: {', '.join(close)}." if close else f"There are: {_listed(every)}."


def _listed(names: Iterable[str], most: int = 10) -> str:
    every = tuple(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
