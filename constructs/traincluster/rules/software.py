"""What can go wrong with what a node runs its job with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from traincluster.rules.engine import rule
from traincluster.rules.finding import Finding
from trainrun.spec import ecr_image, is_pinned, registry_of


@dataclass(frozen=True, kw_only=True)
class SoftwareFacts:
    """What a job runs with, by which image's means, and what its nodes reach."""

    container: str
    requirements: str
    conda: str
    region: str | None
    """The nodes'; None when it is not known."""
    isolated: bool
    """Whether nodes reach AWS's services only."""
    ami: str | None
    """The image; None when it is not known."""
    is_deep_learning: bool
    """Whether that is one of AWS's deep-learning images."""


@rule(
    "container-not-pinned",
    summary="A container image is named by its digest, so that every node, and every later one, runs the same.",
    source="github.com/opencontainers/distribution-spec: a tag may be moved, a digest is the content's own",
    levels=("warning",),
)
def container_not_pinned(facts: SoftwareFacts) -> Iterator[Finding]:
    if facts.container and not is_pinned(facts.container):
        yield Finding(
            "warning",
            "container-not-pinned",
            f"container is {facts.container!r}, a tag, which may mean another image when a node is replaced during a run.",
            "Add the digest: NAME@sha256:... (docker buildx imagetools inspect NAME, or the registry's page, shows it).",
        )


@rule(
    "software-is-reachable",
    summary="Isolated nodes reach the registry of their container, or the index of their packages.",
    source="docs.aws.amazon.com/AmazonECR/latest/userguide/vpc-endpoints.html: the endpoints are those of one region's ECR",
    levels=("warning",),
)
def software_is_reachable(facts: SoftwareFacts) -> Iterator[Finding]:
    if not facts.isolated:
        return
    if facts.requirements or facts.conda:
        name, what = ("requirements", "index of packages") if facts.requirements else ("conda", "channel of packages")
        yield Finding(
            "warning",
            "software-is-reachable",
            f"{name} is set, but isolated nodes reach no {what} on the internet.",
            "Let the file name one in the VPC, put the packages into the image, or make the "
            "environment once with nodes that are not isolated: it is kept in the checkpoint bucket.",
        )
    if not facts.container:
        return
    ecr = ecr_image(facts.container)
    if ecr is None:
        reached = f"{registry_of(facts.container)}, where isolated nodes have no way to"
    elif facts.region is not None and ecr.region != facts.region:
        reached = f"ECR in {ecr.region}, while isolated nodes in {facts.region} reach that of their own region"
    else:
        return
    yield Finding(
        "warning",
        "software-is-reachable",
        f"The container image is in {reached}.",
        "Copy it into ECR in the nodes' region, or have it in the nodes' image already.",
    )


@rule(
    "software-is-in-image",
    summary="The nodes' image has the program that the job's software needs: a container engine, or conda.",
    source="docs.aws.amazon.com/dlami/latest/devguide: the images have Docker and NVIDIA's toolkit, and lately no conda",
    levels=("warning",),
)
def software_is_in_image(facts: SoftwareFacts) -> Iterator[Finding]:
    image = facts.ami or "the image"
    if facts.conda:
        yield Finding(
            "warning",
            "software-is-in-image",
            f"conda is set, and whether {image} has conda is not known here: AWS's newer PyTorch images have none.",
            "Have micromamba, mamba or conda in an image of your own, or use requirements or container.",
        )
    if facts.container and not facts.is_deep_learning:
        yield Finding(
            "warning",
            "software-is-in-image",
            f"container is set, which AWS's deep-learning images have Docker for; whether {image} has it is not known here.",
            "Have Docker or podman in the image, and for NVIDIA GPUs the NVIDIA Container Toolkit.",
        )
