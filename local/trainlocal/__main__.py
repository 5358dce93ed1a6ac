"""`python -m trainlocal`: prepare, up, env, down, status, kill."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from trainlocal.fleet.packages import PackagesMissing, prepare
from trainlocal.fleet.tiers import TIERS, choose
from trainlocal.local import Local, LocalError, attach, is_up, start

DEFAULT_DIRECTORY = Path("build/local")


def _prepare(arguments: argparse.Namespace) -> None:
    try:
        print(f"the packages of the node image are in {prepare()}")
    except PackagesMissing as error:
        print(f"nodes that boot are not to be had: {error}")
    choice = choose()
    print(f"tier: {choice.tier} ({choice.description}); {choice.reason}")


def _up(arguments: argparse.Namespace) -> None:
    local = start(arguments.directory, arguments.tier)
    local.detach()
    print(f"# tier: {local.tier} ({local.description}); {local.reason}")
    _print_exports(local)


def _env(arguments: argparse.Namespace) -> None:
    _print_exports(attach(arguments.directory))


def _print_exports(local: Local) -> None:
    for name, value in local.environment().items():
        print(f"export {name}={shlex.quote(value)}")


def _down(arguments: argparse.Namespace) -> None:
    if not is_up(arguments.directory):
        print(f"no local cloud is running in {arguments.directory}: there is nothing to end")
        return
    attach(arguments.directory).stop()
    print("the local cloud has ended")


def _status(arguments: argparse.Namespace) -> None:
    local = attach(arguments.directory)
    print(f"{local.endpoint}  tier: {local.tier} ({local.description})")
    for node in local.nodes():
        seconds = "" if node.boot_seconds is None else f"booted in {node.boot_seconds:.1f} s"
        print(f"{node.instance_id}  {node.address:15}  {node.state:8}  pid {node.pid or '-'}  {seconds}  {node.detail}")


def _kill(arguments: argparse.Namespace) -> None:
    attach(arguments.directory).kill(arguments.instance_id)
    print(f"{arguments.instance_id} was killed; its group will replace it")


def main() -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainlocal", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, action, text in (
        ("prepare", _prepare, "download and unpack what the nodes' image needs (the only step that uses the network)"),
        ("up", _up, "start the emulated cloud and its fleet, and leave them running"),
        ("env", _env, "print the variables with which the cdk CLI and boto3 see the local cloud, for a shell to evaluate"),
        ("down", _down, "end a local cloud that was left running"),
        ("status", _status, "show the endpoint and the nodes"),
        ("kill", _kill, "end a node as a power cut would"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(action=action)
        if name == "prepare":
            continue
        command.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY, help=f"default: {DEFAULT_DIRECTORY}")
        if name == "up":
            command.add_argument("--tier", choices=TIERS, help="default: the best one that this machine allows")
        if name == "kill":
            command.add_argument("instance_id")
    arguments = parser.parse_args()
    try:
        arguments.action(arguments)
    except (LocalError, ValueError) as error:
        print(f"trainlocal: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
