"""What can go wrong with what starts the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from traincluster.rules.engine import rule
from traincluster.rules.finding import Finding
from trainrun.spec import Launcher


@dataclass(frozen=True, kw_only=True)
class LauncherFacts:
    """How a job is launched, and by which image's means."""

    launcher: Launcher
    sets_path: bool
    """Whether the job's environment has a PATH, which may name an Open MPI of the image."""
    ami: str | None
    """The image; None when it is not known."""
    is_deep_learning: bool
    """Whether that is one of AWS's deep-learning images."""


@rule(
    "mpirun-is-in-image",
    summary="An image of one's own has an Open MPI where the job is launched by mpirun.",
    source="docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html: AWS's EFA installer puts Open MPI in /opt/amazon/openmpi",
    levels=("warning",),
)
def mpirun_is_in_image(facts: LauncherFacts) -> Iterator[Finding]:
    if facts.launcher == "mpirun" and not facts.is_deep_learning and not facts.sets_path:
        yield Finding(
            "warning",
            "mpirun-is-in-image",
            f"The job is launched by mpirun, which AWS's deep-learning images have; whether {facts.ami or 'the image'} has it is "
            "not known here. A node without it fails in its check.",
            "Have AWS's EFA installer in the image, or name the folder of another Open MPI in the PATH of the job's environment.",
        )
