"""``trainrun examples``: from JSON lines to a dataset of examples."""

from __future__ import annotations

import argparse
from typing import Any

from trainrun.data.examples_write import write_examples
from trainrun.data.tokenizer import BYTES, tokenizer_of
from trainrun.data.write import find_documents


def add_to(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "examples",
        help="write a dataset of examples for fine-tuning from JSON lines",
        description='Each line is {"prompt": ..., "completion": ...}, {"text": ...} or {"text": ..., "label": ...}.',
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="a file, or a directory of files")
    parser.add_argument("--out", required=True, metavar="URL", help="where to: a directory or s3://bucket/prefix")
    parser.add_argument(
        "--tokenizer",
        default=BYTES,
        metavar="DIR",
        help="folder of the Hugging Face model that is to be fine-tuned (default: bytes)",
    )
    parser.add_argument("--glob", default="**/*.jsonl", help="which files of a directory are taken (default: **/*.jsonl)")
    parser.add_argument("--json", action="store_true", help="print the dataset's description as JSON")
    parser.set_defaults(act=act)


def act(options: argparse.Namespace) -> int:
    """Write the dataset."""
    documents = find_documents(options.sources, pattern=options.glob)
    description = write_examples(documents, tokenizer_of(options.tokenizer), options.out)
    if options.json:
        print(description.to_json(), end="")
        return 0
    classes = f"  {len(description.classes)} classes" if description.classes else ""
    print(f"{description.examples:,} examples  {description.tokens:,} tokens{classes}")
    print(f"Dataset {description.fingerprint[:16]} written to {options.out}.")
    return 0
