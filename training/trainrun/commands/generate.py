"""``trainrun generate``: text from a checkpoint of the bundled GPT."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from trainrun.config import ConfigError
from trainrun.data.tokenizer import BYTES, tokenizer_of
from trainrun.store import open_store


def add_to(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("generate", help="text from the newest good checkpoint")
    parser.add_argument(
        "--checkpoint", required=True, metavar="LOCATION/RUN", help="the run's folder: a directory or an s3:// URL"
    )
    parser.add_argument("--prompt", default="\n", help="text to continue")
    parser.add_argument("--tokenizer", default=BYTES, metavar="DIR", help="folder of the tokenizer of its data (default: bytes)")
    parser.add_argument("--tokens", "--bytes", type=int, default=200, help="how many to add; at byte level a token is a byte")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token each time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(act=act)


def act(options: argparse.Namespace) -> int:
    """Generate."""
    from trainrun.checkpoint.digest import model_digest
    from trainrun.checkpoint.read import newest_good
    from trainrun.evaluation import restore_gpt, tokenizer_name

    if not options.prompt or options.tokens < 1 or options.temperature < 0:
        raise ValueError("The prompt must not be empty, --tokens must be 1 or more, --temperature 0 or more.")
    tokenizer = tokenizer_of(options.tokenizer)
    store = open_store(options.checkpoint)
    commit, gpt = newest_good(
        store, lambda commit: restore_gpt(store, commit), warn=lambda text: print(f"WARNING: {text}", file=sys.stderr)
    )
    if tokenizer.name != tokenizer_name(commit):
        raise ConfigError(
            [
                f"The checkpoint was trained on tokens of {tokenizer_name(commit)}, not on those of --tokenizer "
                f"{options.tokenizer}. Give the folder with which `trainrun tokens` wrote its data, or {BYTES} for bytes."
            ]
        )
    prompt, _ = tokenizer.continued(options.prompt, "")
    if not prompt:
        raise ConfigError([f"The prompt {options.prompt!r} has no tokens. Give another with --prompt."])
    added = gpt.generate(prompt, options.tokens, temperature=options.temperature, seed=options.seed)
    # Together, since what a token adds to a text can depend on the one before it, such as a space between words.
    text = tokenizer.text([*prompt, *added]).removeprefix(tokenizer.text(prompt))
    if options.json:
        print(json.dumps({"step": commit.step, "model_sha256": model_digest(gpt), "prompt": options.prompt, "text": text}))
    else:
        print(options.prompt + text)
    return 0
