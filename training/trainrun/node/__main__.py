"""``python -m trainrun.node start|run``."""

from __future__ import annotations

import argparse
import sys

from trainrun.node import agent, service
from trainrun.node.places import Places


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="trainrun.node", description="The agent of a training node.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("start", help="have the agent run from now on (systemd unit, or a detached supervisor)")
    commands.add_parser("run", help="run the agent in the foreground")
    commands.add_parser("supervise", help="run the agent, and again whenever it fails")
    command = parser.parse_args().command
    places = Places.from_environment()
    if command == "start":
        print(f"The node agent runs as {service.start(places)}.")
        return 0
    return agent.run(places) if command == "run" else service.supervise(places)


if __name__ == "__main__":
    sys.exit(main())
