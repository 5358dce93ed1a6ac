"""The errors of the engine, in the words and codes of CloudFormation."""

from __future__ import annotations


class FormationError(Exception):
    """An error that CloudFormation answers a request with."""

    code = "ValidationError"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ChangeSetNotFound(FormationError):
    """No such change set."""

    code = "ChangeSetNotFound"


class InvalidChangeSetStatus(FormationError):
    """The change set cannot be executed."""

    code = "InvalidChangeSetStatus"


class AlreadyExists(FormationError):
    """A stack or change set of that name exists."""

    code = "AlreadyExistsException"


class InsufficientCapabilities(FormationError):
    """The template needs a capability that the request does not acknowledge."""

    code = "InsufficientCapabilitiesException"


class InternalFailure(FormationError):
    """The emulation itself is at fault."""

    code = "InternalFailure"
