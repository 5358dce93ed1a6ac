"""The order in which resources are made: after what they need."""

from __future__ import annotations

from collections.abc import Mapping

from trainlocal.cloud.formation.faults import FormationError
from trainlocal.cloud.formation.intrinsics import references
from trainlocal.cloud.formation.template import Declaration


def needs(declaration: Declaration, known: frozenset[str]) -> frozenset[str]:
    """The resources that one resource refers to or says it depends on."""
    referred = {name for name, _ in references(declaration.properties)}
    return frozenset((referred | set(declaration.depends_on)) & known)


def in_order(dependencies: Mapping[str, frozenset[str]]) -> list[str]:
    """Names sorted so that each comes after what it needs, otherwise in the given order.

    Raises ``FormationError`` naming the members of a cycle.
    """
    ordered: list[str] = []
    waiting = dict(dependencies)
    while waiting:
        ready = [name for name, needed in waiting.items() if not any(other in waiting for other in needed)]
        if not ready:
            raise FormationError(f"Circular dependency between resources: [{', '.join(sorted(_cycle(waiting)))}]")
        ordered += ready
        for name in ready:
            del waiting[name]
    return ordered


def _cycle(waiting: Mapping[str, frozenset[str]]) -> set[str]:
    """The names of one cycle among dependencies that cannot be ordered."""
    path: list[str] = []
    name = next(iter(waiting))
    while name not in path:
        path.append(name)
        name = next(needed for needed in sorted(waiting[name]) if needed in waiting)
    return set(path[path.index(name) :])
