"""Rules of FSx for Lustre.

Numbers: CreateFileSystem and CreateFileSystemLustreConfiguration (docs.aws.amazon.com/fsx/latest/APIReference), and
"Using FSx for Lustre" (docs.aws.amazon.com/fsx/latest/LustreGuide/using-fsx-lustre.html).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from traincluster.rules.engine import rule
from traincluster.rules.finding import Finding

Deployment = Literal["SCRATCH_2", "PERSISTENT_1", "PERSISTENT_2"]
LustreStorage = Literal["SSD", "HDD", "INTELLIGENT_TIERING"]

LUSTRE_API = "docs.aws.amazon.com/fsx/latest/APIReference/API_CreateFileSystemLustreConfiguration.html"
CREATE_API = "docs.aws.amazon.com/fsx/latest/APIReference/API_CreateFileSystem.html"
LUSTRE_GUIDE = "docs.aws.amazon.com/fsx/latest/LustreGuide/using-fsx-lustre.html"
REPOSITORY_GUIDE = "docs.aws.amazon.com/fsx/latest/LustreGuide/create-linked-data-repo.html"

THROUGHPUT_PER_TIB: dict[tuple[str, str], tuple[int, ...]] = {
    ("PERSISTENT_1", "SSD"): (50, 100, 200),
    ("PERSISTENT_1", "HDD"): (12, 40),
    ("PERSISTENT_2", "SSD"): (125, 250, 500, 1000),
}
"""PerUnitStorageThroughput, in MB/s per TiB, by deployment and storage."""

EFA_CAPACITY_STEP = {1000: 4800, 500: 9600, 250: 19200, 125: 38400}
"""GiB of one object storage server of an EFA-enabled file system, by throughput per TiB."""

METADATA_IOPS = (1500, 3000, 6000)
METADATA_IOPS_STEP, MOST_METADATA_IOPS = 12_000, 192_000
TIERING_THROUGHPUT = (1000, 2000)
TIERING_THROUGHPUT_STEP, MOST_TIERING_THROUGHPUT = 4000, 2_000_000
MOST_REPOSITORIES = 8


@dataclass(frozen=True, kw_only=True)
class LustreFacts:
    """One FSx for Lustre file system that is to be made. None stands for what is not set, or not known at synth."""

    name: str
    """Path of the construct."""
    deployment: str
    storage: str
    capacity_gib: int | None = None
    capacity_is_known: bool = True
    throughput_per_tib: int | None = None
    throughput: int | None = None
    """MB/s of the whole, with Intelligent-Tiering."""
    read_cache_gib: int | None = None
    metadata_iops: int | None = None
    efa: bool = False
    has_key: bool = False
    """Whether a KMS key of the user's own encrypts it."""
    repositories: tuple[str, ...] = ()
    """The paths in the file system that are linked with S3."""
    exported: tuple[str, ...] = ()
    """Those of them whose changes FSx copies to S3."""
    is_deleted: bool = True
    """Whether it goes with its stack."""
    is_in_stack_of_network: bool = False
    """Whether the subnet that it is in goes with the same stack."""


def capacity_step(deployment: str, storage: str, throughput_per_tib: int | None) -> tuple[tuple[int, ...], int]:
    """The capacities of a file system in GiB: the small ones, and the step of which all others are multiples."""
    if storage == "HDD":
        return ((), 1800 if throughput_per_tib == 40 else 6000)
    return ((1200,), 2400)


def nearest_capacities(capacity: int, small: tuple[int, ...], step: int) -> tuple[int, ...]:
    """The allowed capacities next below and next above one that is not allowed."""
    below = max([one for one in (*small, capacity // step * step) if 0 < one < capacity], default=None)
    above = min(one for one in (*small, (capacity // step + 1) * step) if one > capacity)
    return (above,) if below is None else (below, above)


@rule("lustre-capacity-grid", summary="FSx for Lustre comes in certain capacities only", source=CREATE_API)
def lustre_capacity_grid(facts: LustreFacts) -> Iterator[Finding]:
    name = "lustre-capacity-grid"
    if facts.storage == "INTELLIGENT_TIERING" or not facts.capacity_is_known:
        return
    small, step = capacity_step(facts.deployment, facts.storage, facts.throughput_per_tib)
    allowed = f"{', '.join(map(str, small))}{' and ' if small else ''}multiples of {step}"
    if facts.capacity_gib is None:
        yield Finding("error", name, f"{facts.name} has no capacity_gib.", f"Allowed: {allowed}.")
    elif facts.capacity_gib < 1 or (facts.capacity_gib not in small and facts.capacity_gib % step):
        nearest = " or ".join(map(str, nearest_capacities(max(facts.capacity_gib, 0), small, step)))
        yield Finding(
            "error",
            name,
            f"capacity_gib of {facts.name} is {facts.capacity_gib}. {facts.deployment} {facts.storage} allows {allowed}.",
            f"Set it to {nearest}.",
        )


@rule("lustre-throughput", summary="Persistent FSx for Lustre comes in certain throughputs, scratch in one", source=LUSTRE_API)
def lustre_throughput(facts: LustreFacts) -> Iterator[Finding]:
    name = "lustre-throughput"
    given = facts.throughput_per_tib
    if facts.storage == "INTELLIGENT_TIERING" or facts.deployment == "SCRATCH_2":
        if given is not None:
            kind = "Intelligent-Tiering" if facts.storage == "INTELLIGENT_TIERING" else "A scratch file system"
            other = "Set throughput, in MB/s, instead." if facts.storage == "INTELLIGENT_TIERING" else "Leave it out."
            yield Finding("error", name, f"throughput_per_tib of {facts.name} is {given}. {kind} takes none.", other)
        return
    allowed = THROUGHPUT_PER_TIB.get((facts.deployment, facts.storage))
    if allowed is not None and given not in allowed:
        yield Finding(
            "error",
            name,
            f"throughput_per_tib of {facts.name} is {'not set' if given is None else given}. {facts.deployment} {facts.storage} "
            f"allows {', '.join(map(str, allowed))} MB/s per TiB.",
            "Choose one of these.",
        )


@rule("lustre-storage-type", summary="Which storage each deployment type of FSx for Lustre has", source=LUSTRE_API)
def lustre_storage_type(facts: LustreFacts) -> Iterator[Finding]:
    name = "lustre-storage-type"
    allowed = {"SCRATCH_2": ("SSD",), "PERSISTENT_1": ("SSD", "HDD"), "PERSISTENT_2": ("SSD", "INTELLIGENT_TIERING")}
    choices = allowed[facts.deployment]
    if facts.storage not in choices:
        yield Finding(
            "error",
            name,
            f"storage of {facts.name} is {facts.storage}. {facts.deployment} has {' or '.join(choices)} only.",
            "Choose one of these, or another deployment.",
        )


@rule("lustre-intelligent-tiering", summary="What Intelligent-Tiering needs and what it cannot do", source=LUSTRE_API)
def lustre_intelligent_tiering(facts: LustreFacts) -> Iterator[Finding]:
    name = "lustre-intelligent-tiering"
    if facts.storage != "INTELLIGENT_TIERING":
        for setting, value in (("throughput", facts.throughput), ("read_cache_gib", facts.read_cache_gib)):
            if value is not None:
                yield Finding(
                    "error", name, f"{setting} of {facts.name} is {value}, which belongs to Intelligent-Tiering.", "Leave it out."
                )
        return
    if facts.capacity_gib is not None:
        yield Finding(
            "error",
            name,
            f"capacity_gib of {facts.name} is {facts.capacity_gib}. Intelligent-Tiering grows and shrinks with its files.",
            "Leave it out.",
        )
    given, step = facts.throughput, TIERING_THROUGHPUT_STEP
    on_step = given is not None and 0 < given <= MOST_TIERING_THROUGHPUT and given % step == 0
    if not on_step and (given not in TIERING_THROUGHPUT or facts.efa):
        small = "" if facts.efa else "1000, 2000 and "
        with_efa = " with EFA" if facts.efa else ""
        yield Finding(
            "error",
            name,
            f"throughput of {facts.name} is {'not set' if given is None else given}. Intelligent-Tiering{with_efa} allows "
            f"{small}multiples of {step} up to {MOST_TIERING_THROUGHPUT:,} MB/s.",
            f"Set it to {step}, or to a multiple of that.",
        )
    if facts.read_cache_gib and given and not 8 * given <= 1000 * facts.read_cache_gib <= 32_768 * given:
        yield Finding(
            "error",
            name,
            f"read_cache_gib of {facts.name} is {facts.read_cache_gib}.",
            f"Allowed at {given} MB/s: {8 * given // 1000} to {32_768 * given // 1000:,}, or 0 for no cache.",
        )
    if facts.repositories:
        yield Finding(
            "error",
            name,
            f"{facts.name} is linked with S3, which FSx does not offer with Intelligent-Tiering.",
            "Leave the repositories out, or choose SSD storage.",
        )


@rule("lustre-efa", summary="EFA-enabled FSx for Lustre: PERSISTENT_2, whole storage servers", source=LUSTRE_GUIDE)
def lustre_efa(facts: LustreFacts) -> Iterator[Finding]:
    name = "lustre-efa"
    if not facts.efa:
        return
    if facts.deployment != "PERSISTENT_2":
        yield Finding(
            "error",
            name,
            f"efa of {facts.name} is true, but its deployment is {facts.deployment}. Only PERSISTENT_2 can have EFA.",
            "Set deployment to PERSISTENT_2, or efa to false.",
        )
        return
    step = EFA_CAPACITY_STEP.get(facts.throughput_per_tib or 0)
    if facts.storage != "SSD" or step is None or facts.capacity_gib is None:
        return
    if facts.capacity_gib < step or facts.capacity_gib % step:
        nearest = " or ".join(map(str, nearest_capacities(facts.capacity_gib, (), step)))
        yield Finding(
            "error",
            name,
            f"capacity_gib of {facts.name} is {facts.capacity_gib}. With EFA at {facts.throughput_per_tib} MB/s per TiB, one "
            f"storage server holds {step} GiB, and a file system is made of whole ones.",
            f"Set it to {nearest}, or choose another throughput_per_tib: 1000 allows multiples of 4800.",
        )


@rule("lustre-metadata-iops", summary="Metadata performance of FSx for Lustre comes in certain steps", source=LUSTRE_API)
def lustre_metadata_iops(facts: LustreFacts) -> Iterator[Finding]:
    name, given = "lustre-metadata-iops", facts.metadata_iops
    if given is None:
        return
    if facts.deployment != "PERSISTENT_2":
        yield Finding(
            "error",
            name,
            f"metadata_iops of {facts.name} is {given}, but only PERSISTENT_2 can have it set.",
            "Leave it out, or set deployment to PERSISTENT_2.",
        )
        return
    if given not in METADATA_IOPS and not (given % METADATA_IOPS_STEP == 0 and 0 < given <= MOST_METADATA_IOPS):
        allowed = f"1500, 3000, 6000 and multiples of {METADATA_IOPS_STEP} up to {MOST_METADATA_IOPS:,}"
        yield Finding("error", name, f"metadata_iops of {facts.name} is {given}.", f"Allowed: {allowed}.")


@rule("lustre-repositories", summary="At most 8 links with S3, none inside another", source=REPOSITORY_GUIDE)
def lustre_repositories(facts: LustreFacts) -> Iterator[Finding]:
    name, paths = "lustre-repositories", facts.repositories
    if len(paths) > MOST_REPOSITORIES:
        yield Finding(
            "error",
            name,
            f"{facts.name} has {len(paths)} repositories. FSx allows {MOST_REPOSITORIES}.",
            "Link a common prefix instead of each folder.",
        )
    for number, path in enumerate(paths):
        for other in paths[number + 1 :]:
            if overlap(path, other):
                yield Finding(
                    "error",
                    name,
                    f"{facts.name} is linked with S3 at {path} and at {other}, of which one holds the other.",
                    "Link folders that lie beside each other.",
                )


@rule("lustre-key", summary="A scratch file system takes no KMS key", source=CREATE_API)
def lustre_key(facts: LustreFacts) -> Iterator[Finding]:
    if facts.has_key and facts.deployment == "SCRATCH_2":
        yield Finding(
            "error",
            "lustre-key",
            f"{facts.name} has an encryption_key, but FSx encrypts scratch file systems with a key of its own.",
            "Leave it out, or choose a persistent deployment.",
        )


@rule(
    "lustre-deleted-with-data",
    summary="A file system that goes with its stack takes with it what is not on S3",
    source="docs.aws.amazon.com/fsx/latest/LustreGuide/delete-file-system.html",
    levels=("warning",),
)
def lustre_deleted_with_data(facts: LustreFacts) -> Iterator[Finding]:
    if facts.is_deleted and facts.deployment != "SCRATCH_2" and "/" not in facts.exported:
        rest = f" outside {', '.join(facts.exported)}" if facts.exported else ""
        yield Finding(
            "warning",
            "lustre-deleted-with-data",
            f"{facts.name} is deleted with its stack, and its files{rest} are on no S3 bucket.",
            "Link a bucket (linked_bucket), or set removal_policy to RETAIN and put the file system, with its network, into a "
            "stack that stays.",
        )


@rule(
    "lustre-stays-in-network",
    summary="A file system that stays keeps its subnet from being deleted",
    source="github.com/aws/aws-cdk/issues/31521",
    levels=("warning",),
)
def lustre_stays_in_network(facts: LustreFacts) -> Iterator[Finding]:
    if not facts.is_deleted and facts.is_in_stack_of_network:
        yield Finding(
            "warning",
            "lustre-stays-in-network",
            f"{facts.name} stays when its stack is destroyed and goes on being billed; the subnet that it is in belongs to the "
            "same stack and then cannot be deleted, so that the destroy fails.",
            "Put the file system and its network into a stack of their own, which stays.",
        )


def overlap(path: str, other: str) -> bool:
    """Whether two absolute paths are the same, or one lies in the other."""
    one, two = (f"{each.rstrip('/')}/" for each in (path, other))
    return one.startswith(two) or two.startswith(one)
