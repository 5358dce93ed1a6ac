"""What can go wrong at the end of a run: nodes that nobody ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from traincluster.rules.engine import rule
from traincluster.rules.finding import Finding
from trainrun.spec import ShutdownSpec


@dataclass(frozen=True, kw_only=True)
class EndingFacts:
    """What becomes of a cluster's nodes."""

    shutdown: ShutdownSpec
    instance_type: str
    has_accelerators: bool


@rule(
    "nodes-kept-for-ever",
    summary="Nodes with accelerators that are kept after a run's end are ended some time.",
    source="A failed run of a Friday evening costs the weekend: keep_minutes bounds it",
    levels=("warning",),
)
def nodes_kept_for_ever(facts: EndingFacts) -> Iterator[Finding]:
    shutdown = facts.shutdown
    kept = [name for name in ("on_success", "on_failure") if getattr(shutdown, name) == "keep"]
    if facts.has_accelerators and kept and shutdown.keep_minutes is None:
        yield Finding(
            "warning",
            "nodes-kept-for-ever",
            f"{' and '.join(kept)} keeps the nodes, and keep_minutes is null: {facts.instance_type} nodes cost until "
            "somebody ends them.",
            "Set keep_minutes. A person on a node can still lengthen it: sudo /opt/traincluster/bin/trainrun keep --minutes N.",
        )
