"""The command `traincluster`: list the rules, pin the image of a cluster, break something in it for exercise."""

from __future__ import annotations

import argparse
import os
import random
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    except KeyboardInterrupt:
        print("Interrupted. A fault that was made stays as long as it was told to.", file=sys.stderr)
        return 130
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
    _add_chaos(commands)
    return parser


def _add_chaos(commands: Any) -> None:
    chaos = commands.add_parser(
        "chaos",
        help="break something in a running cluster, to see it recover (docs/chaos.md)",
        description="Makes one fault, or faults at random. It asks first: what it does is real, and costs what it costs.",
    )
    chaos.add_argument("fault", nargs="?", help="its name; --list shows all")
    chaos.add_argument("--list", action="store_true", help="list the faults and end")
    chaos.add_argument("--stack", default="TrainingClusterStack", help="the cluster's stack; default: %(default)s")
    chaos.add_argument("--region", default=_region(), help="the stack's region; default: $AWS_REGION")
    chaos.add_argument("--node", default="any", help="any, rank0, other (than rank 0's) or an instance id; default: %(default)s")
    chaos.add_argument(
        "--seconds",
        type=float,
        default=30.0,
        help="how long a temporary fault lasts, or until when a notice gives; default: %(default)g",
    )
    chaos.add_argument("--random", action="store_true", help="make faults at random instead of one")
    chaos.add_argument("--faults", help="those to choose from at random, separated by commas; default: those of one node")
    chaos.add_argument(
        "--seed", type=int, default=0, help="of the choice: the same seed makes the same faults; default: %(default)s"
    )
    chaos.add_argument("--every", type=float, default=300.0, help="seconds between two at random; default: %(default)g")
    chaos.add_argument("--for", dest="duration", type=float, default=3600.0, help="seconds in all; default: %(default)g")
    chaos.add_argument("--yes", action="store_true", help="do not ask")
    chaos.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    chaos.set_defaults(run=_chaos)


def _agreed(question: str) -> bool:
    try:
        return input(f"{question}. Go on? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        raise ValueError("There is nobody to ask whether to go on. Give --yes.") from None


def _chaos(options: argparse.Namespace) -> str:
    from traincluster import chaos  # here, since it loads boto3

    known = {fault.name: fault for fault in chaos.FAULTS}
    if options.list:
        lasts = {True: " (for --seconds)", False: ""}
        return "\n".join(f"{fault.name:<16} {fault.summary}{lasts[fault.temporary]}" for fault in chaos.FAULTS)
    if options.random and options.fault:
        raise ValueError(f"{options.fault} and --random are given. Name one fault, or give --random, not both.")
    if not options.random and not options.fault:
        raise ValueError("Name one fault, or give --random. traincluster chaos --list shows the faults.")
    if options.faults and not options.random:
        raise ValueError("--faults says what to choose from at random. Give --random too, or name one fault.")
    usual = ",".join(fault.name for fault in chaos.FAULTS if fault.at_random)
    names = [options.fault] if options.fault else (options.faults or usual).split(",")
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"There is no fault {', '.join(map(repr, unknown))}. Allowed: {', '.join(known)}.")
    for name, least in (("seconds", 0.0), ("every", 1.0), ("duration", 0.0)):
        if not getattr(options, name) >= least:
            shown = "for" if name == "duration" else name
            raise ValueError(f"--{shown} is {getattr(options, name):g}. Allowed: {least:g} or more seconds.")
    cluster = chaos.Cluster(options.stack, region=options.region)
    faults = [known[name] for name in names]
    what = f"one of {', '.join(names)} every {options.every:g} s for {options.duration:g} s" if options.random else names[0]
    question = (
        f"{options.stack} in {cluster.region}, account {cluster.account}, nodes {', '.join(cluster.nodes()) or 'none'}: {what}"
    )
    if options.dry_run:
        return f"{question}. Nothing was done."
    if not options.yes and not _agreed(question):
        raise ValueError("Nothing was done.")
    if options.random:
        chaos.exercise(
            cluster,
            faults,
            seed=options.seed,
            every=options.every,
            duration=options.duration,
            seconds=options.seconds,
            tell=lambda text: print(text, flush=True),
        )
        return "Done."
    luck = random.Random(options.seed).random()
    return chaos.make(cluster, faults[0], node=options.node, seconds=options.seconds, luck=luck)


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
