"""What a node runs its job with: the image's Python, an environment made on it, or a container."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Software:
    """The job's Python, and how programs are started with it. This one is the image's own, without anything added.

    A program is started by ``subprocess.Popen(software.command(argv, environment), env=environment)``, where the environment is
    ``software.environment(os.environ)`` with whatever the program is to find besides.
    """

    sees_node: bool = True
    """Whether programs find all files of the node, such as EFA's libraries, where they are."""

    def __init__(self, python: str) -> None:
        """Args:
        python: the Python that has torch, by the path under which programs find it.
        """
        self.python = python

    def command(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
        """The command that runs a program with this software.

        Args:
            argv: the program and its arguments.
            environment: what the program is to find; None is the agent's own. Only its names get into the command.
        """
        del environment
        return list(argv)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment for programs over ``base``."""
        return dict(base)

    def processes(self) -> list[int]:
        """Processes that are the job's and no children of the agent's; theirs are not among them."""
        return []

    def clear(self) -> None:
        """End what programs started by `command` have left running beyond the agent's reach."""
