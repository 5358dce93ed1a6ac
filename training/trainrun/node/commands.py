"""Commands of the operating system that `prepare` calls."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from trainrun.node.outcome import StepFailed

Run = Callable[..., str]
"""Runs a command given as arguments and returns what it prints; raises StepFailed when it fails."""

TIMEOUT_SECONDS = 300


def run(*command: str, timeout: float = TIMEOUT_SECONDS) -> str:
    """What a command prints.

    Args:
        command: the program and its arguments.
        timeout: how long it may take, in seconds.

    Raises:
        StepFailed: there is no such command, it does not end, or it fails; with what it said.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StepFailed(f"{' '.join(command)} cannot be run: {error}.") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()[-60:])
        raise StepFailed(f"{' '.join(command)} failed with status {done.returncode}: {said or 'it said nothing'}.")
    return done.stdout


def remark(said: str) -> str:
    """What a command said, in brackets: mount says nothing, but a helper that stands in for a file system tells so."""
    return f" ({' '.join(said.split())})" if said.strip() else ""
