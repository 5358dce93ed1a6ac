"""The rules of the network: pure functions from facts to findings."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traincluster.rules import check
from traincluster.rules.network import LeftBehind, NodesInNetwork, ShellAccess, ZoneOfNodes

NODES = NodesInNetwork(
    instance_type="p5.48xlarge",
    nodes=4,
    interfaces=33,
    addresses_per_node=1,
    efa_interfaces=32,
    most_efa_interfaces=32,
    other_addresses=0,
    subnet_is_public=False,
    subnet_cidr="10.0.0.0/24",
)
ZONE = ZoneOfNodes(
    instance_type="p5en.48xlarge",
    capacity_is_reserved=False,
    region="us-east-1",
    zone="use1-az2",
    zone_is_given=True,
    zone_is_chosen=False,
    offered_regions=("us-east-1", "us-west-2"),
    offered_zones=("use1-az2", "use1-az6"),
)


def found(facts, **changes) -> list[tuple[str, str]]:
    return [(one.level, one.rule) for one in check(dataclasses.replace(facts, **changes))]


def test_nothing_is_found_in_a_sound_cluster():
    assert found(NODES) == found(ZONE) == []


def test_net_05_a_public_subnet_is_an_error():
    assert found(NODES, subnet_is_public=True) == [("error", "nodes-need-private-subnet")]
    assert found(NODES, subnet_is_public=None) == []


@pytest.mark.parametrize(
    ("nodes", "addresses", "others", "cidr", "fits"),
    [
        (251, 1, 0, "10.0.0.0/24", True),
        (252, 1, 0, "10.0.0.0/24", False),
        (240, 1, 11, "10.0.0.0/24", True),
        (240, 1, 12, "10.0.0.0/24", False),
        (7, 32, 0, "10.0.0.0/24", True),
        (8, 32, 0, "10.0.0.0/24", False),
        (100_000, 32, 0, None, True),
    ],
)
def test_the_subnet_has_an_address_for_each(nodes, addresses, others, cidr, fits):
    changes = {"nodes": nodes, "addresses_per_node": addresses, "other_addresses": others, "subnet_cidr": cidr}
    assert found(NODES, **changes) == ([] if fits else [("error", "subnet-too-small")])


def test_the_older_layout_is_named_where_it_takes_the_addresses():
    (older,) = check(dataclasses.replace(NODES, nodes=8, addresses_per_node=32))
    assert "efa-only" in older.fix and "251 free addresses at most, but 256 are needed" in older.message
    (current,) = check(dataclasses.replace(NODES, nodes=252))
    assert "efa-only" not in current.fix


def test_efa_that_is_left_out_is_warned_of_where_nodes_talk():
    assert found(NODES, efa_interfaces=0) == [("warning", "efa-left-out")]
    assert found(NODES, efa_interfaces=0, nodes=1) == []
    assert found(NODES, efa_interfaces=0, most_efa_interfaces=0) == []


def test_a_region_or_zone_without_the_type_is_warned_of():
    assert found(ZONE, region="eu-west-9", offered_zones=()) == [("warning", "type-not-offered")]
    assert found(ZONE, zone="use1-az1") == [("warning", "type-not-offered")]
    assert found(ZONE, zone="us-east-1a") == []  # a name is another place in each account
    assert found(ZONE, region=None, zone="use1-az1") == []
    assert found(ZONE, offered_regions=(), offered_zones=(), zone="use1-az1") == []


def test_a_reservation_asks_for_its_zone():
    unnamed = {"zone": None, "zone_is_given": False}
    assert found(ZONE, capacity_is_reserved=True) == []
    assert found(ZONE, capacity_is_reserved=True, **unnamed) == [("warning", "zone-of-reservation")]
    assert found(ZONE, capacity_is_reserved=True, zone_is_chosen=True, **unnamed) == [("warning", "zone-of-reservation")]


def test_a_zone_that_nobody_chose_is_told():
    unnamed = {"zone": None, "zone_is_given": False}
    assert found(ZONE, **unnamed) == [("info", "zone-not-chosen")]
    assert found(ZONE, zone_is_chosen=True, **unnamed) == []


def test_ssh_from_everywhere_is_an_error_and_from_public_ranges_a_warning():
    facts = ShellAccess(sources=())
    assert found(facts) == found(facts, sources=("10.0.0.0/8", "192.168.0.0/16")) == []
    assert found(facts, sources=("0.0.0.0/0",)) == [("error", "ssh-from-anywhere")]
    assert found(facts, sources=("10.0.0.0/8", "203.0.114.0/24")) == [("warning", "ssh-from-public-range")]


def test_what_stays_is_told_in_one_line():
    assert found(LeftBehind(stays=())) == []
    (finding,) = check(LeftBehind(stays=("the bucket A", "the key B")))
    assert (finding.level, finding.rule) == ("info", "stays-after-destroy")
    assert "the bucket A; the key B" in finding.message


ADDRESSES = st.integers(1, 64)


@given(nodes=st.integers(1, 5000), each=ADDRESSES, others=st.integers(0, 50), prefix=st.integers(16, 28))
def test_more_nodes_never_fit_where_fewer_do_not(nodes, each, others, prefix):
    changes = {"addresses_per_node": each, "other_addresses": others, "subnet_cidr": f"10.0.0.0/{prefix}"}
    if found(NODES, nodes=nodes, **changes):
        assert found(NODES, nodes=nodes + 1, **changes)


@given(
    st.builds(
        NodesInNetwork,
        instance_type=st.just("p5.48xlarge"),
        nodes=st.integers(1, 10**5),
        interfaces=ADDRESSES,
        addresses_per_node=ADDRESSES,
        efa_interfaces=st.integers(0, 64),
        most_efa_interfaces=st.integers(0, 64),
        other_addresses=st.integers(0, 100),
        subnet_is_public=st.none() | st.booleans(),
        subnet_cidr=st.none() | st.just("10.0.0.0/26"),
    )
)
def test_every_finding_is_sentences(facts):
    for finding in check(facts):
        assert "\n" not in str(finding)
        assert finding.message.endswith(".") and finding.fix.endswith(".")
