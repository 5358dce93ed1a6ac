"""What can go wrong at the end of a run: nodes that nobody ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from traincluster.rules.engine import rule
from traincluster.rules.finding import Finding


@dataclass(frozen=True, kw_only=True)
class EndingFacts:
    """What becomes of a cluster's nodes."""

    kept_on: tuple[str, ...]
    """Of "on_success" and "on_failure" those that keep the nodes."""
    keep_minutes: int | None
    """For how long; None until somebody ends them."""
    instance_type: str
    has_accelerators: bool


@rule(
    "nodes-kept-for-ever",
    summary="Nodes with accelerators that are kept after a run's end are ended some time.",
    source="A failed run of a Friday evening costs the weekend: keep_minutes bounds it",
    levels=("warning",),
)
def nodes_kept_for_ever(facts: EndingFacts) -> Iterator[Finding]:
    if facts.has_accelerators and facts.kept_on and facts.keep_minutes is None:
        yield Finding(
            "warning",
            "nodes-kept-for-ever",
            f"{' and '.join(facts.kept_on)} keeps the nodes, and keep_minutes is null: {facts.instance_type} nodes cost until "
            "somebody ends them.",
            "Set keep_minutes. A person on a node can still lengthen it: sudo /opt/traincluster/bin/trainrun keep --minutes N.",
        )
