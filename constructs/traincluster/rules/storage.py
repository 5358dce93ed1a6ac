"""Rules of what nodes mount: EFS, EBS volumes, the instance store, mount points. Those of FSx are in `rules.lustre`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from traincluster.rules.engine import rule
from traincluster.rules.finding import Finding
from traincluster.rules.lustre import overlap

EBS_GUIDE = "docs.aws.amazon.com/ebs/latest/userguide"
DEVICE_GUIDE = "docs.aws.amazon.com/AWSEC2/latest/UserGuide/device_naming.html"
EFA_GUIDE = "docs.aws.amazon.com/fsx/latest/LustreGuide/efa-file-systems.html"

MOST_VOLUMES = 11
"""EC2 advises the names /dev/sdf to /dev/sdp."""

RESERVED = frozenset(
    [
        "/",
        "/bin",
        "/boot",
        "/dev",
        "/etc",
        "/home",
        "/lib",
        "/lib64",
        "/opt",
        "/proc",
        "/root",
        "/run",
        "/sbin",
        "/srv",
        "/sys",
        "/tmp",
        "/usr",
        "/var",
        "/opt/amazon",
        "/opt/pytorch",
        "/opt/traincluster",
        "/var/lib/traincluster",
        "/var/log/traincluster",
    ]
)
RESERVED_TREES = ("/boot", "/dev", "/etc", "/proc", "/run", "/sys", "/usr")


@dataclass(frozen=True, kw_only=True)
class ElasticFacts:
    """One EFS file system that is to be made."""

    name: str
    is_deleted: bool
    """Whether it goes with its stack."""


@rule(
    "efs-stays",
    summary="An EFS file system that stays goes on costing by what is in it",
    source="docs.aws.amazon.com/efs/latest/ug/delete-efs-fs.html",
    levels=("info",),
)
def efs_stays(facts: ElasticFacts) -> Iterator[Finding]:
    if not facts.is_deleted:
        yield Finding(
            "info",
            "efs-stays",
            f"{facts.name} stays when its stack is destroyed, and is billed by what is stored in it.",
            "Set removal_policy to DESTROY to have it deleted with its files.",
        )


@dataclass(frozen=True, kw_only=True)
class BucketFacts:
    """A bucket for checkpoints or datasets that is to be made."""

    name: str
    is_removal_wanted: bool
    """Whether its removal policy is DESTROY."""
    is_removal_confirmed: bool
    """Whether the context says so too."""
    archived_after: int | None = None
    """Age in days at which its objects cannot be read at once any more."""


@rule(
    "bucket-removal-unconfirmed",
    summary="A bucket is deleted with its stack only when told twice",
    source="the two-step deletion of Data Solutions Framework on AWS",
    levels=("warning",),
)
def bucket_removal_unconfirmed(facts: BucketFacts) -> Iterator[Finding]:
    if facts.is_removal_wanted and not facts.is_removal_confirmed:
        yield Finding(
            "warning",
            "bucket-removal-unconfirmed",
            f"removal_policy of {facts.name} is DESTROY, but the bucket stays when its stack is destroyed.",
            "To have it deleted with all that is in it, say so again: -c traincluster:remove-data-on-destroy=true.",
        )


@rule(
    "bucket-removal",
    summary="A bucket that goes with its stack takes its data with it",
    source="docs.aws.amazon.com/AmazonS3/latest/userguide/delete-bucket.html",
    levels=("warning",),
)
def bucket_removal(facts: BucketFacts) -> Iterator[Finding]:
    if facts.is_removal_wanted and facts.is_removal_confirmed:
        yield Finding(
            "warning",
            "bucket-removal",
            f"{facts.name} is deleted when its stack is destroyed, with every version of every object in it.",
            "Leave removal_policy at RETAIN to keep it.",
        )


@rule(
    "bucket-archive",
    summary="Archived checkpoints have to be restored before a run resumes",
    source="docs.aws.amazon.com/AmazonS3/latest/userguide/restoring-objects.html",
    levels=("info",),
)
def bucket_archive(facts: BucketFacts) -> Iterator[Finding]:
    if facts.archived_after is not None:
        yield Finding(
            "info",
            "bucket-archive",
            f"Objects of {facts.name} are archived when they are {facts.archived_after} days old. A run that has been paused for "
            "longer cannot resume until its newest checkpoint is restored by hand.",
            "Set glacier_days to None to keep them readable.",
        )


@dataclass(frozen=True, kw_only=True)
class VolumeFacts:
    """One EBS volume."""

    path: str
    type: str
    size_gib: int
    iops: int | None = None
    throughput_mib_s: int | None = None
    instance_type: str
    xen: bool = False
    """Whether the instance type is not built on Nitro."""


@rule("volume-size", summary="Sizes of gp3 and io2 volumes", source=f"{EBS_GUIDE}/ebs-volume-types.html")
def volume_size(facts: VolumeFacts) -> Iterator[Finding]:
    least = 4 if facts.type == "io2" else 1
    most = 16_384 if facts.xen else 65_536
    if not least <= facts.size_gib <= most:
        yield Finding(
            "error",
            "volume-size",
            f"size_gib of the volume at {facts.path} is {facts.size_gib}.",
            f"Allowed for {facts.type} on {facts.instance_type}: {least} to {most:,}.",
        )


@rule("volume-iops", summary="Operations per second of gp3 and io2 volumes", source=f"{EBS_GUIDE}/provisioned-iops.html")
def volume_iops(facts: VolumeFacts) -> Iterator[Finding]:
    name, given = "volume-iops", facts.iops
    where = f"iops of the volume at {facts.path} is {given}."
    if facts.type == "io2":
        per_gib, most, kind = (500, 64_000, "io2") if facts.xen else (1000, 256_000, "io2 Block Express")
        top = min(facts.size_gib * per_gib, most)
        if given is None:
            yield Finding("error", name, f"The io2 volume at {facts.path} has no iops.", f"Set it, 100 to {top:,}.")
        elif not 100 <= given <= top:
            why = f"{kind} has at most {per_gib} per GiB, and {most:,} in all"
            yield Finding("error", name, where, f"Allowed: 100 to {top:,} ({why}).")
    elif given is not None:
        top = max(min(facts.size_gib * 500, 80_000), 3000)
        if not 3000 <= given <= top:
            yield Finding("error", name, where, f"Allowed: 3000 to {top:,} (gp3 has at most 500 per GiB, and 80,000 in all).")


@rule("volume-throughput", summary="Throughput of gp3 volumes", source=f"{EBS_GUIDE}/general-purpose.html")
def volume_throughput(facts: VolumeFacts) -> Iterator[Finding]:
    name, given = "volume-throughput", facts.throughput_mib_s
    if given is None:
        return
    where = f"throughput_mib_s of the volume at {facts.path} is {given}."
    if facts.type == "io2":
        yield Finding("error", name, where, "io2 has none to set; it follows from iops. Leave it out.")
        return
    top = min((facts.iops or 3000) // 4, 2000)
    if not 125 <= given <= top:
        more = "" if top == 2000 else " Set more iops for more."
        yield Finding("error", name, where, f"Allowed: 125 to {top} (a quarter MiB/s for each of iops, at most 2,000).{more}")


@dataclass(frozen=True, kw_only=True)
class StorageFacts:
    """All that the nodes of one cluster mount."""

    instance_type: str
    mount_paths: tuple[tuple[str, str], ...] = ()
    """What is mounted, in words, and where."""
    volumes: int = 0
    instance_store: bool = False
    """Whether the instance store is to be mounted."""
    local_disks: int = 0
    nitro_version: int | None = None
    uses_efa: bool = False
    lustre_over_efa: tuple[str, ...] = ()
    """The mount points of EFA-enabled Lustre file systems."""


@rule(
    "mount-paths",
    summary="Mount points are absolute, free, and not inside each other",
    source="ParallelCluster's SharedStorageMountDir, DuplicateMountDir and OverlappingMountDir validators",
)
def mount_paths(facts: StorageFacts) -> Iterator[Finding]:
    name = "mount-paths"
    for what, path in facts.mount_paths:
        if path != "/" and not _is_plain(path):
            yield Finding(
                "error",
                name,
                f"The path of {what} is {path!r}.",
                "Give an absolute path of letters, digits and -_.@ without a slash at its end, such as /fsx.",
            )
        elif path in RESERVED or any(path.startswith(f"{tree}/") for tree in RESERVED_TREES):
            yield Finding(
                "error",
                name,
                f"The path of {what} is {path}, which belongs to the system.",
                "Choose another, such as /fsx or /data.",
            )
    for number, (what, path) in enumerate(facts.mount_paths):
        for other, where in facts.mount_paths[number + 1 :]:
            if overlap(path, where):
                yield Finding(
                    "error",
                    name,
                    f"{what} is mounted at {path} and {other} at {where}, so that one hides the other.",
                    "Choose paths that lie beside each other.",
                )


@rule(
    "volume-count",
    summary="EC2 has names for 11 volumes",
    source="docs.aws.amazon.com/AWSEC2/latest/UserGuide/device_naming.html",
)
def volume_count(facts: StorageFacts) -> Iterator[Finding]:
    if facts.volumes > MOST_VOLUMES:
        yield Finding(
            "error",
            "volume-count",
            f"A node has {facts.volumes} volumes. EC2 advises the names /dev/sdf to /dev/sdp, which are {MOST_VOLUMES}.",
            "Use fewer and larger ones.",
        )


@rule("instance-store-exists", summary="Only some types have an instance store", source="EC2's DescribeInstanceTypes")
def instance_store_exists(facts: StorageFacts) -> Iterator[Finding]:
    if facts.instance_store and not facts.local_disks:
        yield Finding(
            "error",
            "instance-store-exists",
            f"instance_store is set, but {facts.instance_type} has no instance store that the catalogue knows of.",
            "Leave it out, add a DataVolume, or choose a type with local disks.",
        )


@rule("lustre-efa-clients", summary="Which nodes reach Lustre by EFA", source=EFA_GUIDE)
def lustre_efa_clients(facts: StorageFacts) -> Iterator[Finding]:
    name = "lustre-efa-clients"
    if not facts.lustre_over_efa:
        return
    where = " and ".join(facts.lustre_over_efa)
    family = facts.instance_type.partition(".")[0]
    if not facts.uses_efa:
        yield Finding(
            "error",
            name,
            f"The Lustre file system at {where} is EFA-enabled, but the nodes ({facts.instance_type}) have no EFA.",
            "Set efa of the file system to false, or choose a type with EFA.",
        )
    elif family.startswith("trn2") or (facts.nitro_version is not None and facts.nitro_version < 4):
        why = (
            "AWS leaves Trn2 out"
            if family.startswith("trn2")
            else f"it is built on Nitro v{facts.nitro_version}, and 4 is needed"
        )
        yield Finding(
            "error",
            name,
            f"The Lustre file system at {where} is EFA-enabled, but {facts.instance_type} cannot be its client by EFA: {why}.",
            "Set efa of the file system to false: the nodes then reach it by TCP.",
        )


def _is_plain(path: str) -> bool:
    """Whether a path can stand in /etc/fstab and in a unit's name as it is."""
    parts = path.split("/")
    return (
        len(parts) > 1
        and parts[0] == ""
        and all(re.fullmatch(r"[\w.@-]+", part) and part not in (".", "..") for part in parts[1:])
    )
