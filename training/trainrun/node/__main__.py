"""``python -m trainrun.node start|run|fault``."""

from __future__ import annotations

import argparse
import sys

from trainrun.node import agent, faults, service
from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="trainrun.node", description="The agent of a training node.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("start", help="have the agent run from now on (systemd unit, or a detached supervisor)")
    commands.add_parser("run", help="run the agent in the foreground")
    commands.add_parser("supervise", help="run the agent, and again whenever it fails")
    fault = commands.add_parser("fault", help="break something here, for exercise: see traincluster chaos")
    fault.add_argument(
        "name", choices=sorted(faults.FAULTS), help="; ".join(f"{n}: {f.summary}" for n, f in faults.FAULTS.items())
    )
    fault.add_argument("--seconds", type=float, default=30.0, help="how long a temporary fault lasts (default: %(default)s)")
    options = parser.parse_args()
    command = options.command
    places = Places.from_environment()
    if command == "start":
        print(f"The node agent runs as {service.start(places)}.")
        return 0
    if command == "fault":
        try:
            print(faults.make(options.name, places=places, seconds=options.seconds))
        except StepFailed as problem:
            print(problem, file=sys.stderr)
            return 1
        return 0
    return agent.run(places) if command == "run" else service.supervise(places)


if __name__ == "__main__":
    sys.exit(main())
