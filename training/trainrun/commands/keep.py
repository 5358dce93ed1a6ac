"""``trainrun keep``: on a node of a run that has ended, say for how long the nodes stay."""

from __future__ import annotations

import argparse
import getpass
import os
import socket
import time
from typing import Any

from trainrun.config import ConfigError
from trainrun.node.places import Places
from trainrun.spec import RunSpec
from trainrun.store import open_store

MOST_MINUTES = 7 * 24 * 60


def add_to(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("keep", help="on a node of a run that has ended: keep the nodes for longer, or end them now")
    parser.add_argument("--minutes", type=_minutes, required=True, metavar="N", help="from now on; 0 ends them at once")
    parser.set_defaults(act=_keep)


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 <= minutes <= MOST_MINUTES:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to {MOST_MINUTES} (a week)")
    return minutes


def _keep(options: argparse.Namespace) -> int:
    from trainrun.node.keep import moment, prolong

    places = Places.from_environment()
    try:
        spec = RunSpec.from_json(places.spec.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{places.spec} cannot be read: {error}. Run this on a node of the cluster, as root."]) from None
    os.environ.setdefault("AWS_DEFAULT_REGION", spec.region)
    until = time.time() + 60.0 * options.minutes
    end = prolong(open_store(spec.run_location), until=until, by=f"{getpass.getuser()} on {socket.gethostname()}")
    if options.minutes:
        print(f"The nodes of {spec.run}, which has {end.state}, are kept until {moment(until)}.")
    else:
        print(f"The nodes of {spec.run}, which has {end.state}, are ended now.")
    return 0
