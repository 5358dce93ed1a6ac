"""``trainrun goodput``: where a run's time went."""

from __future__ import annotations

import argparse
import json
from typing import Any

from trainrun import goodput
from trainrun.goodput import CAUSES, Goodput
from trainrun.store import open_store


def add_to(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("goodput", help="where a run's time went: training, and losses by cause")
    parser.add_argument("location", help="the run's folder: s3://bucket/prefix/run")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(act=_goodput)


def _goodput(options: argparse.Namespace) -> int:
    found = goodput.of(open_store(options.location))
    if found is None:
        raise ValueError(f"No node has reported to {options.location} yet. Is it the run's own folder, LOCATION/RUN?")
    print(json.dumps(found.to_mapping()) if options.json else _table(found))
    return 0


def _table(found: Goodput) -> str:
    """For people: each cause with its seconds and its part of the wall time."""
    wall = max(found.wall_seconds, 1e-9)
    lines = [f"{'wall time':28}{found.wall_seconds:12.1f} s"]
    lines += [
        f"{cause.replace('_', ' '):28}{found.seconds[cause]:12.1f} s {100 * found.seconds[cause] / wall:5.1f}%"
        for cause in CAUSES
        if found.seconds[cause]
    ]
    share = "unknown: no rank told of its steps" if found.goodput is None else f"{100 * found.goodput:.1f}%"
    lines += [
        f"goodput {share}; {found.steps} steps, {found.repeated_steps} of which were taken twice; "
        f"{found.restarts} restarts; {found.node_hours:.2f} node-hours"
    ]
    return "\n".join(lines)
