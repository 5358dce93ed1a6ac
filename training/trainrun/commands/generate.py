"""``trainrun generate``: text from a checkpoint of the bundled GPT."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from trainrun.store import open_store


def add_to(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("generate", help="text from the newest good checkpoint")
    parser.add_argument(
        "--checkpoint", required=True, metavar="LOCATION/RUN", help="the run's folder: a directory or an s3:// URL"
    )
    parser.add_argument("--prompt", default="\n", help="text to continue")
    parser.add_argument("--bytes", type=int, default=200, help="how many to add")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest byte each time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(act=act)


def act(options: argparse.Namespace) -> int:
    """Generate."""
    from trainrun.checkpoint.digest import model_digest
    from trainrun.checkpoint.read import newest_good
    from trainrun.data.write import decode, encode
    from trainrun.evaluation import restore_gpt

    if not options.prompt or options.bytes < 1 or options.temperature < 0:
        raise ValueError("The prompt must not be empty, --bytes must be 1 or more, --temperature 0 or more.")
    store = open_store(options.checkpoint)
    commit, gpt = newest_good(
        store, lambda commit: restore_gpt(store, commit), warn=lambda text: print(f"WARNING: {text}", file=sys.stderr)
    )
    prompt = encode(options.prompt.encode()).tolist()
    text = decode(gpt.generate(prompt, options.bytes, temperature=options.temperature, seed=options.seed))
    if options.json:
        print(json.dumps({"step": commit.step, "model_sha256": model_digest(gpt), "prompt": options.prompt, "text": text}))
    else:
        print(options.prompt + text)
    return 0
