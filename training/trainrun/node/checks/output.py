"""What the programs of a node say."""

from __future__ import annotations

import subprocess

SECONDS = 120.0


def output_of(*command: str, timeout: float = SECONDS) -> str:
    """What a command prints; empty when it cannot be run, does not end, or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
