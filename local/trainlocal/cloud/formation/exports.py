"""The exports of a region and who imports them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainlocal.cloud.formation.faults import FormationError
from trainlocal.cloud.formation.stack import Output, Stack


class Exports:
    """A view of the stacks of one region by what they export and import."""

    def __init__(self, stacks: Iterable[Stack]) -> None:
        self._stacks = [stack for stack in stacks if stack.exists]

    def all(self) -> Iterator[tuple[Stack, Output]]:
        """Every export with the stack that makes it."""
        for stack in self._stacks:
            for output in stack.outputs:
                if output.export is not None:
                    yield stack, output

    def value(self, name: str) -> str:
        """The value of an export; raises ``FormationError`` when nobody exports it."""
        for _, output in self.all():
            if output.export == name:
                return output.value
        raise FormationError(f"No export named {name} found")

    def importers(self, name: str) -> list[str]:
        """The names of the stacks that import an export."""
        return [stack.name for stack in self._stacks if name in stack.imports]

    def check_change(self, stack: Stack, outputs: list[Output]) -> None:
        """Raises when new outputs of a stack would take away or change an export in use, or take a name already taken."""
        after = {output.export: output.value for output in outputs if output.export is not None}
        for owner, output in self.all():
            assert output.export is not None
            if owner is not stack and output.export in after:
                raise FormationError(f"Export with name {output.export} is already exported by stack {owner.name}.")
            users = self.importers(output.export)
            if owner is stack and users and after.get(output.export) != output.value:
                verb = "update" if output.export in after else "delete"
                raise FormationError(f"Cannot {verb} export {output.export} as it is in use by {', '.join(users)}.")
