"""The EFA interfaces in templates, and the rules that let EFA traffic through."""

from __future__ import annotations

import pytest

from traincluster.efa import EfaLayout, network_interfaces, use_efa
from traincluster.instances import instance_type, instance_type_names

# (card, device, kind) of every interface, by AWS's current rule.
LAYOUTS = {
    "p4d.24xlarge": [(0, 0, "interface"), (0, 1, "efa-only")] + [(card, 0, "efa-only") for card in range(1, 4)],
    "p5.48xlarge": [(0, 0, "interface"), (0, 1, "efa-only")] + [(card, 0, "efa-only") for card in range(1, 32)],
    "p5en.48xlarge": [(0, 0, "interface"), (0, 1, "efa-only")] + [(card, 0, "efa-only") for card in range(1, 16)],
    "p6-b200.48xlarge": [(0, 0, "interface"), (0, 1, "efa-only")] + [(card, 0, "efa-only") for card in range(1, 8)],
    "p6-b300.48xlarge": [(0, 0, "interface")] + [(card, 0, "efa-only") for card in range(1, 17)],
    "trn1.32xlarge": [(0, 0, "interface"), (0, 1, "efa-only")] + [(card, 0, "efa-only") for card in range(1, 8)],
    "trn2.48xlarge": [(0, 0, "interface"), (0, 1, "efa-only")] + [(card, 0, "efa-only") for card in range(1, 16)],
    "g5.48xlarge": [(0, 0, "efa")],
    "g5.xlarge": [(0, 0, "interface")],
    "c7i.2xlarge": [(0, 0, "interface")],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_template_lays_out_every_interface(name, cluster_of):
    interfaces = cluster_of(name).interfaces
    assert [(i["NetworkCardIndex"], i["DeviceIndex"], i["InterfaceType"]) for i in interfaces] == LAYOUTS[name]


@pytest.mark.parametrize("name", LAYOUTS)
def test_syn_01_groups_are_on_interfaces_and_nowhere_else(name, cluster_of):
    cluster = cluster_of(name)
    (group,) = [key for key in cluster.resources("AWS::EC2::SecurityGroup") if key.startswith("ClusterSecurityGroup")]
    assert not {"SecurityGroupIds", "SecurityGroups", "SubnetId"} & set(cluster.launch_data)
    for interface in cluster.interfaces:
        assert interface["Groups"] == [{"Fn::GetAtt": [group, "GroupId"]}]
        assert "SubnetId" not in interface  # the Auto Scaling group says where
    assert len(cluster.only("AWS::AutoScaling::AutoScalingGroup")["Properties"]["VPCZoneIdentifier"]) == 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_tear_02_every_interface_goes_with_its_instance(name, cluster_of):
    assert all(interface["DeleteOnTermination"] is True for interface in cluster_of(name).interfaces)
    assert not cluster_of(name).resources("AWS::EC2::NetworkInterface")


@pytest.mark.parametrize("name", LAYOUTS)
def test_net_05_no_public_address(name, cluster_of):
    interfaces = cluster_of(name).interfaces
    if len(interfaces) > 1:  # EC2 rejects the question itself when there are several
        assert all("AssociatePublicIpAddress" not in interface for interface in interfaces)
    else:
        assert interfaces[0]["AssociatePublicIpAddress"] is False


@pytest.mark.parametrize(("name", "efa"), [("p5.48xlarge", 32), ("p5e.48xlarge", 32), ("p5en.48xlarge", 16)])
def test_net_02_device_indexes_stay_below_the_cards_limit(name, efa):
    interfaces = network_interfaces(instance_type(name), efa=True)
    places = [(interface.card, interface.device) for interface in interfaces]
    assert sum(interface.carries_efa for interface in interfaces) == efa
    assert {device for _, device in places} <= {0, 1}
    assert len(set(places)) == len(places)
    assert [interface.kind for interface in interfaces if (interface.card, interface.device) == (0, 0)] == ["interface"]


def test_net_03_card_0_of_p6_b300_carries_no_efa(cluster_of):
    interfaces = cluster_of("p6-b300.48xlarge").interfaces
    assert [i["InterfaceType"] for i in interfaces if i["NetworkCardIndex"] == 0] == ["interface"]
    assert [i["NetworkCardIndex"] for i in interfaces if i["InterfaceType"] != "interface"] == list(range(1, 17))


@pytest.mark.parametrize("name", ["c5n.4xlarge", "g4dn.xlarge", "c7i.2xlarge"])
def test_net_09_efa_on_a_type_without_it_is_refused(name, synthesize):
    with pytest.raises(ValueError, match=f"efa is true, but {name} has no EFA. Set efa to false"):
        synthesize(instance_type=name, efa=True)


def test_net_09_the_refusal_names_sizes_that_have_it():
    with pytest.raises(ValueError, match=r"c5n\.9xlarge, c5n\.18xlarge"):
        use_efa(instance_type("c5n.4xlarge"), True)


def test_efa_can_be_left_out(synthesize):
    cluster = synthesize(instance_type="p4d.24xlarge", efa=False)
    assert [i["InterfaceType"] for i in cluster.interfaces] == ["interface"]
    assert cluster.cluster.run_spec.cluster.efa_interfaces == 0


def test_older_layout_by_parameter(synthesize):
    cluster = synthesize(instance_type="trn1.32xlarge", efa_layout=EfaLayout(kind="efa", device_index=1))
    found = [(i["NetworkCardIndex"], i["DeviceIndex"], i["InterfaceType"]) for i in cluster.interfaces]
    assert found == [(0, 0, "efa")] + [(card, 1, "efa") for card in range(1, 8)]
    assert cluster.cluster.run_spec.cluster.efa_interfaces == 8


def test_layout_beyond_a_cards_limit_is_refused():
    with pytest.raises(ValueError, match=r"network card 1 of hpc6id.32xlarge takes 1. Use device_index=0"):
        network_interfaces(instance_type("hpc6id.32xlarge"), efa=True, layout=EfaLayout(device_index=1))


def test_a_card_of_one_interface_carries_both():
    interfaces = network_interfaces(instance_type("hpc6id.32xlarge"), efa=True)
    assert [(i.card, i.device, i.kind) for i in interfaces] == [(0, 0, "efa"), (1, 0, "efa-only")]


def test_ultraserver_has_efa_on_every_fourth_card():
    interfaces = network_interfaces(instance_type("p6e-gb200.36xlarge"), efa=True)
    assert [(i.card, i.kind) for i in interfaces] == [(0, "interface")] + [(card, "efa-only") for card in (1, 5, 9, 13)]


def test_every_type_of_the_catalogue_has_a_sound_layout():
    for name in instance_type_names():
        type_ = instance_type(name)
        interfaces = network_interfaces(type_, efa=use_efa(type_, None))
        assert (interfaces[0].card, interfaces[0].device) == (0, 0)
        assert interfaces[0].kind != "efa-only", name
        assert len({(i.card, i.device) for i in interfaces}) == len(interfaces), name
        assert all(i.device < type_.interfaces_per_card[i.card] for i in interfaces), name
        assert sum(i.carries_efa for i in interfaces) == type_.max_efa_interfaces, name
        assert all(i.card in type_.efa_cards for i in interfaces if i.carries_efa), name


@pytest.mark.parametrize("name", ["p5.48xlarge", "c7i.2xlarge"])
def test_nodes_may_talk_to_each_other_in_and_out(name, cluster_of):
    cluster = cluster_of(name)
    ingress = cluster.only("AWS::EC2::SecurityGroupIngress")["Properties"]
    egress = cluster.only("AWS::EC2::SecurityGroupEgress")["Properties"]
    group = cluster.interfaces[0]["Groups"][0]
    assert (ingress["GroupId"], ingress["SourceSecurityGroupId"], ingress["IpProtocol"]) == (group, group, "-1")
    assert (egress["GroupId"], egress["DestinationSecurityGroupId"], egress["IpProtocol"]) == (group, group, "-1")
    # Both exist before a node starts.
    rules = {*cluster.resources("AWS::EC2::SecurityGroupIngress"), *cluster.resources("AWS::EC2::SecurityGroupEgress")}
    assert rules <= set(cluster.only("AWS::AutoScaling::AutoScalingGroup")["DependsOn"])
