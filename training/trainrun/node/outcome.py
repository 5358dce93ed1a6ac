"""How the agent's work, or one step of it, ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ASKED_TO_STOP = 75
"""Exit code of a rank that saved and left because it was asked to (EX_TEMPFAIL of sysexits.h)."""

AGAIN = 1
"""Exit code of an agent that is to be started again at once."""

DO_NOT_RESTART = 78
"""Exit code of an agent that a restart cannot help: wrong document, failed check (EX_CONFIG of sysexits.h)."""


class StepFailed(Exception):
    """A step of the agent failed; the text says what was seen, what was expected and what to do."""


class Unfit(StepFailed):
    """This node is not fit to train (any more); another may take its place."""


class Leave(BaseException):
    """This node's part has ended without being a failure: it was asked to stop, or its group lets it go.

    A BaseException like SystemExit, because a signal raises it at any point, libraries' "except Exception" included.
    """


class Signalled(Leave):
    """The agent itself was asked to end, by a signal: the machine goes down, or the service manager starts it anew."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the job ended."""

    state: Literal["succeeded", "failed", "stopped"]
    """"stopped" is a run that saved because its capacity ends, and that goes on when it is started again."""
    reason: str
