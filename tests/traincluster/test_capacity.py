"""How each kind of capacity is rendered, and which combinations are refused."""

from __future__ import annotations

import pytest
from aws_cdk import aws_ec2 as ec2
from hypothesis import given
from hypothesis import strategies as st

from traincluster import Capacity

RESERVATION = "cr-0123456789abcdef0"
GROUP_ARN = "arn:aws:resource-groups:us-east-1:123456789012:group/ultraserver"


def test_on_demand_asks_for_nothing(cluster_of):
    data = cluster_of("p5.48xlarge").launch_data
    assert "InstanceMarketOptions" not in data
    assert "CapacityReservationSpecification" not in data
    assert cluster_of("p5.48xlarge").only("AWS::EC2::PlacementGroup")["Properties"] == {"Strategy": "cluster"}


def test_spot_is_one_time_and_without_a_price(synthesize):
    data = synthesize(instance_type="g5.48xlarge", capacity=Capacity.spot()).launch_data
    assert data["InstanceMarketOptions"] == {
        "MarketType": "spot",
        "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
    }


def test_cap_01_block_has_no_placement_group(synthesize):
    cluster = synthesize(instance_type="p5.48xlarge", capacity=Capacity.block(RESERVATION))
    assert cluster.launch_data["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    assert cluster.launch_data["CapacityReservationSpecification"] == {
        "CapacityReservationTarget": {"CapacityReservationId": RESERVATION}
    }
    assert "Placement" not in cluster.launch_data
    assert not cluster.resources("AWS::EC2::PlacementGroup")


def test_cap_01_block_with_placement_group_is_refused(synthesize):
    with pytest.raises(ValueError, match=r"Capacity Block.*placement_group"):
        synthesize(instance_type="p5.48xlarge", capacity=Capacity.block(RESERVATION), placement_group=True)


def test_cap_02_reservation_gets_no_group_by_itself(synthesize):
    cluster = synthesize(instance_type="p5.48xlarge", capacity=Capacity.reservation(RESERVATION))
    assert not cluster.resources("AWS::EC2::PlacementGroup")
    assert "Placement" not in cluster.launch_data
    assert "InstanceMarketOptions" not in cluster.launch_data
    assert cluster.launch_data["CapacityReservationSpecification"] == {
        "CapacityReservationTarget": {"CapacityReservationId": RESERVATION}
    }


def test_cap_02_a_group_that_is_asked_for_is_honoured(synthesize):
    cluster = synthesize(instance_type="p5.48xlarge", capacity=Capacity.reservation(RESERVATION), placement_group=True)
    (group,) = cluster.resources("AWS::EC2::PlacementGroup")
    assert cluster.launch_data["Placement"] == {"GroupName": {"Ref": group}}
    assert any("Name the reservation's own group" in warning for warning in cluster.annotations["warning"])


def test_cap_02_the_reservations_own_group_is_used(synthesize):
    stack = synthesize().stack
    own = ec2.PlacementGroup.from_placement_group_name(stack, "Own", "reserved-group")
    cluster = synthesize(instance_type="p5.48xlarge", capacity=Capacity.reservation(RESERVATION), placement_group=own)
    assert cluster.launch_data["Placement"] == {"GroupName": "reserved-group"}
    assert not cluster.resources("AWS::EC2::PlacementGroup")


@pytest.mark.parametrize("name", ["t3.large", "t2.large"])
def test_cap_06_burstable_types_take_no_cluster_group(name, synthesize):
    with pytest.raises(ValueError, match=f"placement_group is true, but burstable types cannot be in one: {name}"):
        synthesize(instance_type=name, placement_group=True)
    assert not synthesize(instance_type=name).resources("AWS::EC2::PlacementGroup")


def test_cap_06_other_types_take_one(synthesize):
    assert synthesize(instance_type="m5.large", placement_group=True).resources("AWS::EC2::PlacementGroup")


def test_placement_group_can_be_left_out(synthesize):
    assert "Placement" not in synthesize(instance_type="p4d.24xlarge", placement_group=False).launch_data


def test_resource_group_of_an_ultraserver(synthesize):
    cluster = synthesize(instance_type="p6e-gb200.36xlarge", capacity=Capacity.block(GROUP_ARN))
    assert cluster.launch_data["CapacityReservationSpecification"] == {
        "CapacityReservationTarget": {"CapacityReservationResourceGroupArn": GROUP_ARN}
    }


@pytest.mark.parametrize(
    ("name", "capacity"),
    [("p6e-gb200.36xlarge", "on-demand"), ("trn2u.48xlarge", "spot"), ("g5.48xlarge", f"block:{RESERVATION}")],
)
def test_capacity_that_ec2_does_not_sell_is_refused(name, capacity, synthesize):
    with pytest.raises(ValueError, match=f"EC2 sells {name} only as"):
        synthesize(instance_type=name, capacity=Capacity.parse(capacity))


@pytest.mark.parametrize(
    "text", ["on-demand", "spot", f"reservation:{RESERVATION}", f"block:{RESERVATION}", f"block:{GROUP_ARN}"]
)
def test_parse_reads_what_the_documentation_says(text):
    capacity = Capacity.parse(text)
    assert ":".join(filter(None, [capacity.kind, capacity.reserved])) == text


@given(st.text() | st.sampled_from(["reservation:", "block:cr-", "spot:", "on-demand:cr-1", "Spot"]))
def test_parse_refuses_in_one_sentence_what_it_cannot_read(text):
    try:
        capacity = Capacity.parse(text)
    except ValueError as error:
        assert "reservation" in str(error)
        assert str(error).endswith(".")
    else:
        assert text.startswith(capacity.kind)
