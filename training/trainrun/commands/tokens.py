"""``trainrun tokens``: from text files to a token dataset."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from trainrun.data.tokenizer import BYTES, tokenizer_of
from trainrun.data.write import find_documents, write_dataset


def add_to(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("tokens", help="write a token dataset from text files")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="a file, or a directory of files")
    parser.add_argument("--out", required=True, metavar="URL", help="where to: a directory or s3://bucket/prefix")
    parser.add_argument(
        "--tokenizer", default=BYTES, metavar="DIR", help="folder of a Hugging Face tokenizer or model (default: bytes)"
    )
    parser.add_argument("--glob", default="**/*", help="which files of a directory are taken (default: all, at any depth)")
    parser.add_argument("--held-out", type=float, default=0.05, help="share of the bytes kept for evaluation, in whole files")
    parser.add_argument("--json", action="store_true", help="print the dataset's description as JSON")
    parser.set_defaults(act=act)


def act(options: argparse.Namespace) -> int:
    """Write the dataset."""
    tokenizer = tokenizer_of(options.tokenizer)
    documents = find_documents(options.sources, pattern=options.glob)
    total = sum(document.size for document in documents)
    done = [0]

    def progress(size: int) -> None:
        done[0] += size
        if sys.stderr.isatty():
            print(f"\r{100 * done[0] // total:3}%  {done[0]:,} of {total:,} bytes", end="", file=sys.stderr, flush=True)

    description = write_dataset(documents, options.out, tokenizer=tokenizer, held_out=options.held_out, progress=progress)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if options.json:
        print(description.to_json(), end="")
        return 0
    for name, split in description.splits.items():
        print(f"{name:9} {split.documents:>8,} files  {split.bytes:>15,} bytes  {split.tokens:>15,} tokens")
    print(f"Dataset {description.fingerprint[:16]} written to {options.out}.")
    return 0
