"""What can go wrong with the user data of a node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from traincluster.rules.engine import rule
from traincluster.rules.finding import Finding

LIMIT_BYTES = 16_384
"""EC2's limit (docs.aws.amazon.com/AWSEC2/latest/UserGuide/user-data.html)."""


@dataclass(frozen=True, kw_only=True)
class UserDataFacts:
    """The document that a node boots with."""

    most_bytes: int
    """Its size before base64, once CloudFormation has put names in place of references, at most."""


@rule(
    "user-data-fits",
    summary=f"The user data has at most {LIMIT_BYTES:,} bytes after all substitutions.",
    source="docs.aws.amazon.com/AWSEC2/latest/UserGuide/user-data.html, opentuna/opentuna#29",
)
def user_data_fits(facts: UserDataFacts) -> Iterator[Finding]:
    over = facts.most_bytes - LIMIT_BYTES
    if over > 0:
        yield Finding(
            "error",
            "user-data-fits",
            f"The user data can be {facts.most_bytes:,} bytes long, {over:,} more than the {LIMIT_BYTES:,} that EC2 takes.",
            "Shorten the job's arguments, environment or configuration, or put them into a file of the job's source.",
        )
