"""``trainrun checkpoint ls|verify``: what a run has saved, and whether it is whole."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from trainrun.store import StoreKeyMissing, open_store
from trainrun.words import counted


def add_to(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("checkpoint", help="list or verify a run's checkpoints")
    parser.add_argument("what", choices=("ls", "verify"), help="ls reads the COMMITs, verify reads every byte")
    parser.add_argument("run", metavar="LOCATION/RUN", help="the run's folder: a directory or an s3:// URL")
    parser.add_argument("--json", action="store_true", help="print a list as JSON")
    parser.set_defaults(act=act)


def act(options: argparse.Namespace) -> int:
    """List or verify; exit code 1 when one is damaged or there is none."""
    from trainrun.checkpoint.layout import Damaged, committed_steps, read_commit
    from trainrun.checkpoint.read import verify

    store = open_store(options.run)
    rows: list[dict[str, Any]] = []
    for step in committed_steps(store):
        row: dict[str, Any] = {"step": step}
        try:
            commit = read_commit(store, step)
            row.update(tokens=commit.tokens, bytes=commit.bytes, world=commit.world, time=commit.time, attempt=commit.attempt)
            if options.what == "verify":
                verify(store, commit)
                row["verified"] = True
        except (Damaged, StoreKeyMissing) as error:
            row["damage"] = str(error)
        rows.append(row)
        if not options.json:
            print(_line(row), flush=True)
    if options.json:
        print(json.dumps(rows))
    if not rows:
        print(f"There is no checkpoint at {store.url}.", file=sys.stderr)
    return 0 if rows and not any("damage" in row for row in rows) else 1


def _line(row: dict[str, Any]) -> str:
    if "attempt" not in row:
        return f"step {row['step']:>9}  DAMAGED: {row['damage']}"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row["time"]))
    judgement = f"  DAMAGED: {row['damage']}" if "damage" in row else "  verified" if "verified" in row else ""
    size = f"{row['tokens']:>15,} tokens  {row['bytes']:>15,} bytes"
    return f"step {row['step']:>9}  {when} UTC  {size}  {counted(row['world'], 'rank')}{judgement}"
