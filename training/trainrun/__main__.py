"""The commands: ``python -m trainrun tokens|examples|evaluate|generate|checkpoint|keep|check|goodput|boot ...``. Progress goes
to stderr, results to stdout."""

from __future__ import annotations

import argparse
import sys

from trainrun.commands import boot, check, checkpoint, evaluate, examples, generate, goodput, keep, tokens
from trainrun.config import ConfigError
from trainrun.errors import CheckpointError
from trainrun.store import StoreError


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(prog="trainrun", description="Tools around training runs and their checkpoints.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (tokens, examples, evaluate, generate, checkpoint, keep, check, goodput, boot):
        command.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        code: int = options.act(options)
    except (ConfigError, CheckpointError, StoreError, ValueError) as error:
        print(f"trainrun: {error}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
