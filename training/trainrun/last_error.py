"""The error by which a rank ended, for the node agent: what a launcher prints of it does not tell kinds of errors apart."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = "errors"
"""Below ``$TRAINRUN_STATE``; one file a rank, named by the rank."""


@dataclass(frozen=True, kw_only=True)
class LastError:
    """How a rank ended."""

    rank: int
    kinds: tuple[str, ...]
    """Names of the exception's class and of all that it derives from, its own first."""
    number: int
    """The operating system's number of it (errno); 0 when it has none."""
    message: str
    time: float
    """Seconds since the epoch."""


def record(error: BaseException) -> None:
    """Write down the error that ends this rank, if a node agent looks after it. Never raises: the error itself matters more."""
    state = os.environ.get("TRAINRUN_STATE")
    if not state:
        return
    rank = int(os.environ.get("RANK", "0"))
    kinds = tuple(kind.__name__ for kind in type(error).__mro__)
    number = error.errno or 0 if isinstance(error, OSError) else 0
    found = LastError(rank=rank, kinds=kinds, number=number, message=str(error)[:2000], time=time.time())
    with suppress(OSError):
        folder = Path(state) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(rank)).write_text(json.dumps(asdict(found)), encoding="utf-8")


def read(state: Path) -> list[LastError]:
    """The errors of this machine's ranks, the first to happen first: others mostly follow from it."""
    found = []
    for file in (state / FOLDER).glob("[0-9]*"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            fields = json.loads(file.read_text(encoding="utf-8"))
            found.append(LastError(**{**fields, "kinds": tuple(fields["kinds"])}))
    return sorted(found, key=lambda error: error.time)


def clear(state: Path) -> None:
    """Forget the errors of launches that are over."""
    for file in (state / FOLDER).glob("*"):
        file.unlink(missing_ok=True)
