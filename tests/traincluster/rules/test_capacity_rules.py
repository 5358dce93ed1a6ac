"""The rules of capacity and placement, over all that can be asked for."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traincluster.instances import instance_type, instance_type_names
from traincluster.rules import check
from traincluster.rules.capacity import CapacityFacts, quota_of

BLOCK = "cr-0123456789abcdef0"
GROUP_ARN = "arn:aws:resource-groups:us-east-1:123456789012:group/blocks"
NAMES = st.sampled_from(instance_type_names())
FACTS = st.builds(
    CapacityFacts,
    kind=st.sampled_from(["on-demand", "spot", "reservation", "block"]),
    types=st.lists(NAMES.map(instance_type), min_size=1, max_size=4, unique=True).map(tuple),
    nodes=st.integers(1, 300),
    reserved=st.none() | st.sampled_from([BLOCK, GROUP_ARN]),
    reservation_group=st.none() | st.sampled_from(["own", "other"]),
    ends=st.none() | st.datetimes(datetime(2026, 1, 1), datetime(2100, 1, 1), timezones=st.just(timezone.utc)),
    rebalancing=st.booleans(),
    placement=st.sampled_from(["none", "new", "existing"]),
    group=st.none() | st.sampled_from(["own", "other"]),
)


def facts(name: str = "p5.48xlarge", *more: str, **given: object) -> CapacityFacts:
    """Two on-demand nodes of a type, save for what is given."""
    usual = {"kind": "on-demand", "nodes": 2, "reserved": None, "reservation_group": None, "ends": None}
    rest = {"rebalancing": False, "placement": "none", "group": None}
    types = tuple(instance_type(each) for each in (name, *more))
    return CapacityFacts(types=types, **{**usual, **rest, **given})


def found(facts: CapacityFacts, *levels: str) -> set[str]:
    return {finding.rule for finding in check(facts) if finding.level in (levels or ("error", "warning"))}


@given(FACTS)
def test_every_finding_is_in_whole_sentences_and_names_what_was_given(given_facts):
    for finding in check(given_facts):
        assert finding.message.rstrip().endswith(".") and finding.fix.rstrip().endswith(".")
        assert "  " not in finding.message and "None" not in finding.message


@given(FACTS)
def test_what_is_accepted_ec2_sells_and_places(given_facts):
    """The three refusals that EC2 would otherwise make at launch are never missing."""
    if found(given_facts, "error"):
        return
    bought = {"on-demand": "on-demand", "reservation": "on-demand", "spot": "spot", "block": "capacity-block"}
    assert all(bought[given_facts.kind] in each.purchase for each in given_facts.types)
    if given_facts.placement != "none":
        assert given_facts.kind != "block"
        assert all(each.cluster_placement for each in given_facts.types)
    assert len({each.training_processes for each in given_facts.types}) == 1


@given(FACTS)
def test_the_rules_are_pure(given_facts):
    assert check(given_facts) == check(given_facts)


@pytest.mark.parametrize("name", ["p5.48xlarge", "p4d.24xlarge", "trn2.48xlarge"])
def test_cap_01_a_block_takes_no_group(name):
    for placement in ("new", "existing"):
        assert found(facts(name, kind="block", reserved=BLOCK, placement=placement), "error") == {
            "block-takes-no-placement-group"
        }
    assert found(facts(name, kind="block", reserved=BLOCK), "error") == set()


def test_cap_02_a_reservation_and_its_group():
    rule = {"reservation-has-own-placement-group"}
    reserved = {"kind": "reservation", "reserved": BLOCK}
    assert found(facts(**reserved)) == set()
    assert found(facts(**reserved, placement="new"), "warning") == rule
    assert found(facts(**reserved, placement="existing", group="any")) == set()
    own = {**reserved, "reservation_group": "own"}
    assert found(facts(**own, placement="existing", group="own")) == set()
    assert found(facts(**own, placement="existing", group=None)) == set()  # a token: not known before the deploy
    for wrong in ({"placement": "none"}, {"placement": "new"}, {"placement": "existing", "group": "other"}):
        assert found(facts(**own, **wrong), "error") == rule


@pytest.mark.parametrize("name", ["t3.large", "t2.large", "m5.large"])
def test_cap_06_burstable_types_take_no_group(name):
    expected = set() if name == "m5.large" else {"type-takes-no-placement-group"}
    assert found(facts(name, placement="new"), "error") == expected


@pytest.mark.parametrize(
    ("reserved", "nodes", "fine"), [(BLOCK, 64, True), (BLOCK, 65, False), (GROUP_ARN, 256, True), (GROUP_ARN, 257, False)]
)
def test_the_size_of_a_block(reserved, nodes, fine):
    assert ("block-size" not in found(facts(kind="block", reserved=reserved, nodes=nodes))) == fine


def test_ultraservers_are_whole_and_named_by_group():
    ultra = {"kind": "block", "ends": datetime(2026, 12, 24, 11, 30, tzinfo=timezone.utc)}
    assert found(facts("p6e-gb200.36xlarge", **ultra, reserved=GROUP_ARN, nodes=18)) == set()
    assert found(facts("p6e-gb200.36xlarge", **ultra, reserved=GROUP_ARN, nodes=10)) == {"ultraserver-is-whole"}
    assert found(facts("trn2u.48xlarge", **ultra, reserved=BLOCK, nodes=4)) == {"ultraserver-needs-resource-group"}


def test_the_end_of_a_block():
    block = {"kind": "block", "reserved": BLOCK}
    assert found(facts(**block)) == {"block-end-is-known"}
    at_noon = datetime(2026, 12, 24, 12, 0, tzinfo=timezone.utc)
    assert found(facts(**block, ends=at_noon)) == {"block-ends-at-half-past-eleven"}
    assert found(facts(**block, ends=at_noon.replace(hour=11, minute=30))) == set()


def test_types_on_spot_are_alike():
    assert found(facts("g5.12xlarge", "g6.12xlarge", kind="spot")) == {"spot-types-are-alike"}  # another GPU: a warning
    assert found(facts("g5.12xlarge", "g6.12xlarge", kind="spot"), "error") == set()
    for other in ("g5.48xlarge", "g5g.16xlarge", "p4d.24xlarge", "trn1.32xlarge", "c7i.2xlarge"):
        assert found(facts("g5.12xlarge", other, kind="spot"), "error") == {"spot-types-are-alike"}


def test_types_on_spot_are_not_too_many_and_need_room():
    many = [name for name in instance_type_names() if name.startswith(("c7i.", "m7i.", "r7i.", "c6i.", "m6i."))][:41]
    assert "spot-types-count" in found(facts(*many, kind="spot"))
    assert "spot-types-count" not in found(facts(*many[:40], kind="spot"))
    assert "spot-types-in-one-placement-group" in found(facts("c7i.large", "c6i.large", kind="spot", placement="new"))


def test_rebalancing_is_warned_of_where_nodes_train_together():
    assert "rebalancing-stops-the-whole-cluster" in found(facts(kind="spot", rebalancing=True))
    assert "rebalancing-stops-the-whole-cluster" not in found(facts(kind="spot", rebalancing=True, nodes=1))


@pytest.mark.parametrize(
    ("name", "on_demand", "spot"),
    [
        ("p5.48xlarge", "L-417A185B", "L-7212CCBC"),
        ("gr6.8xlarge", "L-DB2E81BA", "L-3819A6DF"),
        ("trn1n.32xlarge", "L-2C3B7624", "L-6B0D517C"),
        ("c7i.2xlarge", "L-1216C47A", "L-34B43A08"),
        ("hpc7a.96xlarge", "L-F7808C92", None),
        ("u7i-12tb.224xlarge", None, None),
    ],
)
def test_the_quota_of_a_type(name, on_demand, spot):
    codes = [quota_of(instance_type(name), spot=wanted) for wanted in (False, True)]
    assert [quota and quota.code for quota in codes] == [on_demand, spot]


def test_the_quota_is_told_of_what_counts_against_it():
    (finding,) = [one for one in check(facts(nodes=4)) if one.rule == "vcpus-within-quota"]
    assert "768 vCPUs" in finding.message
    for reserved in ({"kind": "reservation", "reserved": BLOCK}, {"kind": "block", "reserved": BLOCK}):
        assert found(facts(**reserved), "info") == set()
