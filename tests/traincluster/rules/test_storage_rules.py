"""The rules of storage, on facts of our own."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traincluster.rules import check
from traincluster.rules.lustre import EFA_CAPACITY_STEP, THROUGHPUT_PER_TIB, LustreFacts
from traincluster.rules.storage import BucketFacts, ElasticFacts, StorageFacts, VolumeFacts

GOOD = LustreFacts(
    name="Fsx", deployment="PERSISTENT_2", storage="SSD", capacity_gib=4800, throughput_per_tib=125, exported=("/",)
)
TIERED = LustreFacts(name="Fsx", deployment="PERSISTENT_2", storage="INTELLIGENT_TIERING", throughput=4000, is_deleted=False)


def found(facts) -> dict[str, str]:
    """The findings by rule, as text."""
    return {finding.rule: str(finding) for finding in check(facts)}


def lustre(**changes) -> dict[str, str]:
    return found(dataclasses.replace(GOOD, **changes))


def tiered(**changes) -> dict[str, str]:
    return found(dataclasses.replace(TIERED, **changes))


@pytest.mark.parametrize("facts", [GOOD, TIERED])
def test_good_file_systems_pass(facts):
    assert found(facts) == {}


@pytest.mark.parametrize("deployment", ["SCRATCH_2", "PERSISTENT_1", "PERSISTENT_2"])
@pytest.mark.parametrize("capacity", [1200, 2400, 4800, 7200, 100_800])
def test_sto_03_capacities_on_the_grid_pass(deployment, capacity):
    assert "lustre-capacity-grid" not in lustre(deployment=deployment, capacity_gib=capacity)


@pytest.mark.parametrize(
    ("capacity", "nearest"), [(1000, "1200"), (3600, "2400 or 4800"), (5000, "4800 or 7200"), (1300, "1200 or 2400"), (0, "1200")]
)
def test_sto_03_other_capacities_name_the_nearest(capacity, nearest):
    assert f"Set it to {nearest}." in lustre(capacity_gib=capacity)["lustre-capacity-grid"]


@pytest.mark.parametrize(
    ("throughput", "capacity", "fits"),
    [(12, 6000, True), (12, 12_000, True), (12, 1800, False), (40, 1800, True), (40, 3600, True), (40, 6000, False)],
)
def test_sto_03_hard_disks_have_grids_of_their_own(throughput, capacity, fits):
    findings = lustre(deployment="PERSISTENT_1", storage="HDD", throughput_per_tib=throughput, capacity_gib=capacity)
    assert ("lustre-capacity-grid" not in findings) is fits
    assert "lustre-throughput" not in findings


@given(st.integers(1, 200_000))
def test_sto_03_whatever_is_proposed_is_allowed(capacity):
    finding = lustre(capacity_gib=capacity).get("lustre-capacity-grid")
    if finding is None:
        assert capacity == 1200 or capacity % 2400 == 0
    else:
        proposed = [int(word) for word in finding.partition("Set it to ")[2].partition(".")[0].split(" or ")]
        assert all("lustre-capacity-grid" not in lustre(capacity_gib=one) for one in proposed)
        assert proposed[0] < capacity < proposed[-1] or capacity < proposed[0]


def test_a_capacity_that_is_not_known_at_synth_is_not_judged():
    assert "lustre-capacity-grid" not in lustre(capacity_gib=None, capacity_is_known=False)
    assert "has no capacity_gib" in lustre(capacity_gib=None)["lustre-capacity-grid"]


def test_sto_01_throughput_is_needed_and_one_of_a_few():
    for (deployment, storage), allowed in THROUGHPUT_PER_TIB.items():
        for value in allowed:
            assert "lustre-throughput" not in lustre(deployment=deployment, storage=storage, throughput_per_tib=value)
    assert "PERSISTENT_2 SSD allows 125, 250, 500, 1000" in lustre(throughput_per_tib=None)["lustre-throughput"]
    assert "is 200" in lustre(throughput_per_tib=200)["lustre-throughput"]
    assert "A scratch file system takes none" in lustre(deployment="SCRATCH_2")["lustre-throughput"]


def test_storage_belongs_to_deployments():
    assert "SCRATCH_2 has SSD only" in lustre(deployment="SCRATCH_2", storage="HDD")["lustre-storage-type"]
    assert "lustre-storage-type" in lustre(deployment="PERSISTENT_1", storage="INTELLIGENT_TIERING")


@pytest.mark.parametrize("throughput", [1000, 2000, 4000, 8000, 2_000_000])
def test_intelligent_tiering_takes_these_throughputs(throughput):
    assert tiered(throughput=throughput) == {}


def test_intelligent_tiering_takes_no_other_throughput_no_capacity_and_no_links():
    for throughput in (None, 0, 500, 3000, 2_004_000):
        assert "lustre-intelligent-tiering" in tiered(throughput=throughput)
    assert "with EFA allows multiples of 4000" in tiered(throughput=2000, efa=True)["lustre-intelligent-tiering"]
    assert tiered(throughput=8000, efa=True) == {}
    assert "grows and shrinks" in tiered(capacity_gib=4800)["lustre-intelligent-tiering"]
    assert "does not offer with Intelligent-Tiering" in tiered(repositories=("/",))["lustre-intelligent-tiering"]
    assert "Set throughput, in MB/s, instead" in tiered(throughput_per_tib=125)["lustre-throughput"]
    assert "Allowed at 4000 MB/s: 32 to 131,072" in tiered(read_cache_gib=16)["lustre-intelligent-tiering"]
    assert "belongs to Intelligent-Tiering" in lustre(throughput=4000)["lustre-intelligent-tiering"]


def test_efa_takes_whole_storage_servers():
    for throughput, step in EFA_CAPACITY_STEP.items():
        for capacity in (step, 3 * step):
            assert lustre(efa=True, throughput_per_tib=throughput, capacity_gib=capacity) == {}
        assert "lustre-efa" in lustre(efa=True, throughput_per_tib=throughput, capacity_gib=step // 2)
    assert "Set it to 19200 or 38400" in lustre(efa=True, throughput_per_tib=250, capacity_gib=24_000)["lustre-efa"]
    assert "Only PERSISTENT_2 can have EFA" in lustre(efa=True, deployment="SCRATCH_2", throughput_per_tib=None)["lustre-efa"]


def test_metadata_performance_comes_in_steps():
    for value in (1500, 3000, 6000, 12_000, 24_000, 192_000):
        assert lustre(metadata_iops=value) == {}
    for value in (0, 2000, 18_000, 204_000):
        assert "lustre-metadata-iops" in lustre(metadata_iops=value)
    assert (
        "only PERSISTENT_2"
        in lustre(metadata_iops=1500, deployment="PERSISTENT_1", throughput_per_tib=50)["lustre-metadata-iops"]
    )


def test_links_lie_beside_each_other_and_are_few():
    assert lustre(repositories=("/a", "/ab", "/b/c")) == {}
    for paths in (("/", "/a"), ("/a/b", "/a"), ("/a", "/a/")):
        assert "one holds the other" in lustre(repositories=paths)["lustre-repositories"]
    assert "has 9 repositories" in lustre(repositories=tuple(f"/{n}" for n in range(9)))["lustre-repositories"]


def test_a_scratch_file_system_takes_no_key():
    assert "key of its own" in lustre(deployment="SCRATCH_2", throughput_per_tib=None, has_key=True)["lustre-key"]


def test_files_that_go_with_their_stack_are_warned_of():
    assert "are on no S3 bucket" in lustre(exported=())["lustre-deleted-with-data"]
    assert "outside /a are on no" in lustre(exported=("/a",))["lustre-deleted-with-data"]
    assert lustre(exported=(), is_deleted=False) == {}
    assert lustre(exported=(), deployment="SCRATCH_2", throughput_per_tib=None) == {}
    assert "destroy fails" in lustre(is_deleted=False, is_in_stack_of_network=True)["lustre-stays-in-network"]


def volume(**changes) -> dict[str, str]:
    facts = VolumeFacts(path="/data", type="gp3", size_gib=1000, instance_type="p5.48xlarge")
    return found(dataclasses.replace(facts, **changes))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, None),
        ({"size_gib": 0}, "volume-size"),
        ({"size_gib": 65_537}, "volume-size"),
        ({"size_gib": 20_000}, None),
        ({"size_gib": 20_000, "xen": True}, "volume-size"),
        ({"iops": 80_000}, None),
        ({"iops": 80_001}, "volume-iops"),
        ({"iops": 16_000, "size_gib": 16}, "volume-iops"),
        ({"iops": 100}, "volume-iops"),
        ({"throughput_mib_s": 1000}, "volume-throughput"),
        ({"throughput_mib_s": 1000, "iops": 4000}, None),
        ({"throughput_mib_s": 2001, "iops": 80_000}, "volume-throughput"),
        ({"type": "io2"}, "volume-iops"),
        ({"type": "io2", "iops": 256_000}, None),
        ({"type": "io2", "iops": 256_001}, "volume-iops"),
        ({"type": "io2", "iops": 1001, "size_gib": 1}, "volume-size"),
        ({"type": "io2", "iops": 64_001, "xen": True}, "volume-iops"),
        ({"type": "io2", "iops": 10_000, "throughput_mib_s": 500}, "volume-throughput"),
    ],
)
def test_volumes(changes, rule):
    findings = volume(**changes)
    assert (rule in findings) if rule else (findings == {})


def storage(**changes) -> dict[str, str]:
    return found(dataclasses.replace(StorageFacts(instance_type="p5.48xlarge", local_disks=8, nitro_version=4), **changes))


@pytest.mark.parametrize(
    "path", ["fsx", "/fsx/", "/a/../b", "/", "/usr", "/etc/x", "/a b", "/a'b", "", "/a\n", "/home", "/opt/traincluster"]
)
def test_mount_points_are_plain_paths_of_their_own(path):
    assert "mount-paths" in storage(mount_paths=(("the file system", path),))


@given(st.lists(st.from_regex(r"\A(/[a-z]{1,3}){1,3}\Z"), min_size=2, max_size=4))
def test_mount_points_that_pass_hide_nothing(paths):
    findings = storage(mount_paths=tuple((f"file system {number}", path) for number, path in enumerate(paths)))
    hides = any(
        one == other or one.startswith(f"{other}/")
        for number, one in enumerate(paths)
        for at, other in enumerate(paths)
        if at != number
    )
    if hides:
        assert "mount-paths" in findings


def test_mount_points_beside_each_other_pass():
    assert storage(mount_paths=(("a", "/fsx"), ("b", "/fsx2"), ("c", "/data/one"), ("d", "/data/two"))) == {}


def test_only_types_with_local_disks_have_an_instance_store():
    assert storage(instance_store=True) == {}
    assert "no instance store" in storage(instance_store=True, local_disks=0)["instance-store-exists"]


def test_volumes_beyond_the_names_are_refused():
    assert storage(volumes=11) == {}
    assert "A node has 12 volumes" in storage(volumes=12)["volume-count"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"uses_efa": True}, None),
        ({"uses_efa": False}, "have no EFA"),
        ({"uses_efa": True, "instance_type": "trn2.48xlarge", "nitro_version": 5}, "AWS leaves Trn2 out"),
        ({"uses_efa": True, "instance_type": "p4d.24xlarge", "nitro_version": 3}, "Nitro v3, and 4 is needed"),
        ({"uses_efa": True, "instance_type": "trn1.32xlarge"}, None),
        ({"uses_efa": True, "instance_type": "c7i.48xlarge", "nitro_version": None}, None),
    ],
)
def test_lustre_by_efa_has_certain_clients(changes, says):
    findings = storage(lustre_over_efa=("/fsx",), **changes)
    assert (says in findings["lustre-efa-clients"]) if says else (findings == {})
    assert storage(**changes) == {}


def test_what_becomes_of_buckets_and_efs_is_told():
    assert found(BucketFacts(name="B", is_removal_wanted=False, is_removal_confirmed=True)) == {}
    assert list(found(BucketFacts(name="B", is_removal_wanted=True, is_removal_confirmed=False))) == [
        "bucket-removal-unconfirmed"
    ]
    assert list(found(BucketFacts(name="B", is_removal_wanted=True, is_removal_confirmed=True))) == ["bucket-removal"]
    archive = BucketFacts(name="B", is_removal_wanted=False, is_removal_confirmed=False, archived_after=90)
    assert "90 days old" in found(archive)["bucket-archive"]
    assert list(found(ElasticFacts(name="E", is_deleted=False))) == ["efs-stays"]
    assert found(ElasticFacts(name="E", is_deleted=True)) == {}
