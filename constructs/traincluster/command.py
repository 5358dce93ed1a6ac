"""The command `traincluster`: list the rules, pin the image of a cluster."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from traincluster.rules import rules
from traincluster.rules.image import ROOT_DEVICES

CONTEXT_FILE = "cdk.context.json"
"""The file in which the CDK command finds context, in the folder of cdk.json."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code: 0, or 1 with a sentence on stderr."""
    options = _parser().parse_args(arguments)
    try:
        text: str = options.run(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="traincluster", description="Clusters for training on AWS.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser("rules", help="list the rules that a synth checks")
    listing.set_defaults(run=_list_rules)

    pinning = commands.add_parser(
        "pin-image",
        help="pin the newest image of a type, or move its pin there",
        description=f"Writes the image's id into {CONTEXT_FILE}, where a synth finds it. Commit that file.",
    )
    what = pinning.add_mutually_exclusive_group(required=True)
    what.add_argument("--instance-type", help="pin AWS's deep-learning image for this type")
    what.add_argument("--parameter", help="pin the image that this SSM parameter names")
    pinning.add_argument("--os", choices=list(ROOT_DEVICES), default="ubuntu-24.04", help="operating system, for --instance-type")
    pinning.add_argument("--region", default=_region(), help="region of the cluster; default: $AWS_REGION")
    pinning.add_argument("--ami", help="pin this image rather than the newest, for instance to go back; asks AWS nothing")
    pinning.add_argument("--file", type=Path, default=Path(CONTEXT_FILE), help="the context file; default: %(default)s")
    pinning.set_defaults(run=_pin_image)
    return parser


def _region() -> str | None:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")


def _list_rules(options: argparse.Namespace) -> str:
    entries = []
    for each in rules():
        summary = textwrap.fill(each.summary, 100, initial_indent="    ", subsequent_indent="    ")
        entries.append(f"{each.name} ({', '.join(each.levels)})\n{summary}")
    return "\n".join(entries)


def _pin_image(options: argparse.Namespace) -> str:
    from traincluster.image import NodeImage  # here, since it loads the CDK, which the other commands do without
    from traincluster.pins import look_up_image, pin

    if options.region is None:
        raise ValueError("No region is given. Name the cluster's by --region, or set AWS_REGION.")
    parameter = options.parameter or NodeImage.for_type(options.instance_type, os=options.os).ami
    ami = options.ami or look_up_image(parameter, region=options.region)
    before = pin(options.file, region=options.region, parameter=parameter, ami=ami)
    if before == ami:
        return f"{parameter} in {options.region} stays at {ami}."
    came = f"moves from {before} to {ami}" if before else f"is pinned to {ami}"
    return f"{parameter} in {options.region} {came}, in {options.file}. The next deploy uses it."
