"""How each kind of capacity is rendered, and which combinations are refused."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest
from aws_cdk import aws_ec2 as ec2
from hypothesis import given
from hypothesis import strategies as st

from traincluster import Capacity, TrainingJob
from traincluster.instances import instance_type_names
from trainrun.spec import ConfigError, ShutdownSpec, TimeoutSpec, from_mapping
from trainrun.spec_cluster import nodes_save, terminations_begin

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
    cluster = synthesize(instance_type="p5.48xlarge", capacity=Capacity.block(RESERVATION), placement_group=True)
    assert refusal(cluster).count("capacity is a Capacity Block, but a placement_group is asked for as well") == 1


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
    refused = refusal(synthesize(instance_type=name, placement_group=True))
    assert f"placement_group is set, but burstable types cannot be in one: {name}" in refused
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
    assert f"EC2 sells {name} only as" in refusal(synthesize(instance_type=name, capacity=Capacity.parse(capacity)))


def refusal(cluster) -> str:
    """What the synth says when it is stopped."""
    with pytest.raises(RuntimeError) as caught:
        cluster.stack.node.root.synth()
    return str(caught.value)


def test_all_faults_of_a_cluster_are_reported_together(synthesize):
    refused = refusal(synthesize(instance_type="t3.large", nodes=65, capacity=Capacity.block(RESERVATION), placement_group=True))
    for rule in ("capacity-is-sold", "block-takes-no-placement-group", "block-size"):
        assert f"[{rule}]" in refused


def test_spot_with_several_types_is_bought_by_the_group(synthesize):
    capacity = Capacity.spot(instance_types=["g6.12xlarge", "g5.12xlarge"])
    cluster = synthesize(instance_type="g5.12xlarge", capacity=capacity)
    assert "InstanceMarketOptions" not in cluster.launch_data
    properties = cluster.only("AWS::AutoScaling::AutoScalingGroup")["Properties"]
    assert "LaunchTemplate" not in properties and "CapacityRebalance" not in properties
    policy = properties["MixedInstancesPolicy"]
    assert policy["InstancesDistribution"] == {
        "OnDemandBaseCapacity": 0,
        "OnDemandPercentageAboveBaseCapacity": 0,
        "SpotAllocationStrategy": "price-capacity-optimized",
    }
    assert policy["LaunchTemplate"]["Overrides"] == [{"InstanceType": "g5.12xlarge"}, {"InstanceType": "g6.12xlarge"}]
    assert not cluster.resources("AWS::EC2::PlacementGroup")


def test_rebalancing_is_off_unless_asked_for_and_warned_of(synthesize):
    group = synthesize(capacity=Capacity.spot()).only("AWS::AutoScaling::AutoScalingGroup")
    assert "CapacityRebalance" not in group["Properties"]
    cluster = synthesize(capacity=Capacity.spot(rebalancing=True))
    assert cluster.only("AWS::AutoScaling::AutoScalingGroup")["Properties"]["CapacityRebalance"] is True
    assert any("makes all of them resume" in warning for warning in cluster.annotations["warning"])


def test_cap_07_no_node_is_ever_stopped(synthesize):
    cluster = synthesize(instance_type="g5.48xlarge", capacity=Capacity.spot())
    assert cluster.launch_data["InstanceMarketOptions"]["SpotOptions"]["InstanceInterruptionBehavior"] == "terminate"
    text = json.dumps(cluster.template)
    assert "ec2:StopInstances" not in text and "automate:" not in text
    with pytest.raises(ConfigError, match=r"(?s)stop.*scale_to_zero.*keep"):
        from_mapping(ShutdownSpec, {"on_success": "stop"}, source="the settings")


@pytest.mark.parametrize(
    ("name", "drain"),
    [("p5.48xlarge", "2026-12-24T10:50:00Z"), ("p6e-gb200.36xlarge", "2026-12-24T10:20:00Z")],
)
def test_a_block_is_drained_before_ec2_ends_its_nodes(name, drain, synthesize):
    cluster = synthesize(instance_type=name, nodes=9, capacity=Capacity.parse(f"block:{GROUP_ARN} until 2026-12-24T12:30+01:00"))
    (group,) = cluster.resources("AWS::AutoScaling::AutoScalingGroup")
    assert cluster.only("AWS::AutoScaling::ScheduledAction")["Properties"] == {
        "AutoScalingGroupName": {"Ref": group},
        "StartTime": drain,
        "MinSize": 0,
        "DesiredCapacity": 0,
    }
    assert not any("The end of the Capacity Block" in warning for warning in cluster.annotations["warning"])


def test_a_block_without_an_end_is_warned_of(synthesize):
    cluster = synthesize(instance_type="p5.48xlarge", capacity=Capacity.block(RESERVATION))
    assert not cluster.resources("AWS::AutoScaling::ScheduledAction")
    assert any("no drain is scheduled" in warning for warning in cluster.annotations["warning"])


def test_cap_02_a_reservation_made_in_a_group_puts_its_nodes_there(synthesize):
    capacity = Capacity.reservation(RESERVATION, placement_group="reserved-group")
    cluster = synthesize(instance_type="p5.48xlarge", capacity=capacity)
    assert cluster.launch_data["Placement"] == {"GroupName": "reserved-group"}
    assert not cluster.resources("AWS::EC2::PlacementGroup")
    for other in (True, False):
        refused = refusal(synthesize(instance_type="p5.48xlarge", capacity=capacity, placement_group=other))
        assert "[reservation-has-own-placement-group]" in refused


def test_a_reservation_that_the_app_makes_itself_can_be_used(synthesize):
    reserved = ec2.CfnCapacityReservation(
        synthesize().stack, "Reserved", instance_count=2, instance_platform="Linux/UNIX", instance_type="p5.48xlarge"
    )
    specification = Capacity.reservation(reserved.ref).reservation_specification()
    assert specification.capacity_reservation_target.capacity_reservation_id == reserved.ref


def test_zero_nodes_at_first(synthesize):
    properties = synthesize(start_nodes=False, nodes=4).only("AWS::AutoScaling::AutoScalingGroup")["Properties"]
    assert (properties["MinSize"], properties["MaxSize"]) == ("0", "4")
    assert "DesiredCapacity" not in properties  # with a number, each deploy would set the group back to it


def test_the_quota_is_told(cluster_of):
    told = cluster_of("p5.48xlarge").annotations["info"]
    assert any("384 vCPUs of the quota 'Running On-Demand P instances' (L-417A185B)" in info for info in told)


ENDS = st.datetimes(min_value=datetime(2026, 1, 1), max_value=datetime(2100, 1, 1), timezones=st.just(timezone.utc))
RESERVED = st.sampled_from([RESERVATION, GROUP_ARN])
GROUP_NAMES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=255).filter(
    lambda name: name == name.strip()
)
CAPACITIES = (
    st.just(Capacity.on_demand())
    | st.builds(
        Capacity.spot,
        instance_types=st.lists(st.sampled_from(instance_type_names()), max_size=3).map(tuple),
        rebalancing=st.booleans(),
    )
    | st.builds(Capacity.reservation, RESERVED, placement_group=st.none() | GROUP_NAMES)
    | st.builds(Capacity.block, RESERVED, ends=st.none() | ENDS)
)


@given(CAPACITIES)
def test_parse_reads_what_str_writes(capacity):
    assert Capacity.parse(str(capacity)) == capacity


FRAGMENTS = st.lists(
    st.sampled_from(
        ["spot", "block", ":", RESERVATION, " until ", " in ", " with rebalancing", "2026-12-24", "g5.xlarge", ",", "x"]
    )
).map("".join)


@given(st.text() | FRAGMENTS | st.sampled_from(["reservation:", "block:cr-", "spot:", "on-demand:cr-1", "Spot"]))
def test_parse_refuses_in_sentences_what_it_cannot_read(text):
    try:
        capacity = Capacity.parse(text)
    except ValueError as error:
        assert str(error).endswith((".", "?"))
    else:
        assert Capacity.parse(str(capacity)) == capacity


class TestTerminationHook:
    def test_a_node_that_the_group_ends_saves_first(self, synthesize):
        job = TrainingJob(run="held", configuration={"steps": 10}, timeouts=TimeoutSpec(stop_grace=240))
        cluster = synthesize(job=job)
        (group,) = cluster.resources("AWS::AutoScaling::AutoScalingGroup")
        assert cluster.only("AWS::AutoScaling::LifecycleHook")["Properties"] == {
            "AutoScalingGroupName": {"Ref": group},
            "LifecycleHookName": "save-and-leave",
            "LifecycleTransition": "autoscaling:EC2_INSTANCE_TERMINATING",
            "HeartbeatTimeout": 300,
            "DefaultResult": "CONTINUE",
        }
        assert cluster.cluster.run_spec.cluster.termination_hook == "save-and-leave"

    @pytest.mark.parametrize(
        ("capacity", "asked", "there"),
        [
            ("spot", None, False),
            ("spot with rebalancing", True, True),
            ("on-demand", False, False),
            (f"block:{RESERVATION} until 2026-12-24T11:30Z", None, True),
        ],
    )
    def test_by_default_there_is_one_unless_capacity_is_spot(self, synthesize, capacity, asked, there):
        cluster = synthesize(instance_type="p5.48xlarge", capacity=Capacity.parse(capacity), termination_hook=asked)
        assert bool(cluster.resources("AWS::AutoScaling::LifecycleHook")) is there
        assert bool(cluster.cluster.run_spec.cluster.termination_hook) is there


def test_nodes_know_when_their_block_ends_and_save_before_the_group_is_drained(synthesize):
    cluster = synthesize(
        instance_type="p5.48xlarge", capacity=Capacity.parse(f"block:{RESERVATION} until 2026-12-24T12:30+01:00")
    )
    spec = cluster.cluster.run_spec
    assert spec.cluster.capacity_ends == "2026-12-24T11:30:00+00:00"
    start = cluster.only("AWS::AutoScaling::ScheduledAction")["Properties"]["StartTime"]
    drains = datetime.fromisoformat(start.replace("Z", "+00:00"))
    ends = datetime.fromisoformat(spec.cluster.capacity_ends)
    saves = nodes_save(ends, instance_type="p5.48xlarge", stop_grace=spec.timeouts.stop_grace)
    assert saves + timedelta(seconds=spec.timeouts.stop_grace) < drains < terminations_begin(ends, instance_type="p5.48xlarge")
