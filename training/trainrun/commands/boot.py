"""``trainrun boot``: how long nodes took to their first training step."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from trainrun.boot import PARTS, boots
from trainrun.store import open_store

COLUMNS = (*PARTS, "start", "resume")


def add_to(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("boot", help="how long nodes took from their first instruction to their first training step")
    parser.add_argument("location", help="the run's folder: s3://bucket/prefix/run")
    parser.add_argument("--json", action="store_true", help="one JSON array")
    parser.set_defaults(act=_boot)


def _boot(options: argparse.Namespace) -> int:
    found = boots(open_store(options.location))
    if not found:
        raise ValueError(f"No node of {options.location} has come to a training step. Is it the run's own folder, LOCATION/RUN?")
    if options.json:
        print(json.dumps([{**asdict(boot), "seconds": boot.seconds} for boot in found]))
        return 0
    print(f"{'seconds':<22}" + "".join(f"{name:>10}" for name in (*COLUMNS, "all")))
    for boot in found:
        cells = [boot.parts.get(name) for name in COLUMNS]
        print(f"{boot.node:<22}" + "".join(f"{'-' if cell is None else f'{cell:.2f}':>10}" for cell in (*cells, boot.seconds)))
    return 0
