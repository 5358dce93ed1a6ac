"""The network: one zone, private subnets, a way to S3, and no look-ups."""

from __future__ import annotations

import aws_cdk as cdk
import pytest
from aws_cdk import aws_ec2 as ec2

from traincluster import TrainingNetwork


def test_default_network_is_one_zone_with_one_nat_gateway(cluster_of):
    cluster = cluster_of("c7i.2xlarge")
    subnets = cluster.resources("AWS::EC2::Subnet").values()
    zones = [str(subnet["Properties"]["AvailabilityZone"]) for subnet in subnets]
    assert len(subnets) == 2 and len(set(zones)) == 1
    assert not any(subnet["Properties"]["MapPublicIpOnLaunch"] for subnet in subnets)
    assert len(cluster.resources("AWS::EC2::NatGateway")) == 1
    (endpoint,) = cluster.resources("AWS::EC2::VPCEndpoint").values()
    assert endpoint["Properties"]["VpcEndpointType"] == "Gateway"


def test_nodes_start_when_their_routes_exist(cluster_of):
    cluster = cluster_of("c7i.2xlarge")
    needed = set(cluster.only("AWS::AutoScaling::AutoScalingGroup")["DependsOn"])
    assert set(cluster.resources("AWS::EC2::VPCEndpoint")) <= needed
    assert any("DefaultRoute" in name for name in needed)


def test_zone_by_name_needs_no_look_up(synthesize):
    cluster = synthesize(network={"availability_zone": "us-west-2b"})
    zones = {subnet["Properties"]["AvailabilityZone"] for subnet in cluster.resources("AWS::EC2::Subnet").values()}
    assert zones == {"us-west-2b"}


def test_net_12_isolated_network_has_every_endpoint(synthesize):
    cluster = synthesize(network={"isolated": True})
    assert not cluster.resources("AWS::EC2::NatGateway")
    assert not cluster.resources("AWS::EC2::InternetGateway")
    endpoints = cluster.resources("AWS::EC2::VPCEndpoint")
    services = {
        "".join(part for part in one["Properties"]["ServiceName"]["Fn::Join"][1] if isinstance(part, str)).removeprefix(
            "com.amazonaws."
        )
        for one in endpoints.values()
    }
    wanted = {"ssm", "ssmmessages", "ec2messages", "ec2", "autoscaling", "logs", "monitoring", "sts", "kms", "s3"}
    assert {service.strip(".") for service in services} == wanted
    interface = [one["Properties"] for one in endpoints.values() if one["Properties"]["VpcEndpointType"] == "Interface"]
    assert all(one["PrivateDnsEnabled"] for one in interface)
    (group,) = [one for name, one in cluster.resources("AWS::EC2::SecurityGroup").items() if "Endpoints" in name]
    (rule,) = group["Properties"]["SecurityGroupIngress"]
    assert (rule["CidrIp"], rule["FromPort"], rule["ToPort"], rule["IpProtocol"]) == ("10.0.0.0/16", 443, 443, "tcp")
    assert set(endpoints) <= set(cluster.only("AWS::AutoScaling::AutoScalingGroup")["DependsOn"])


def vpc_in(stack: cdk.Stack, *subnets: ec2.SubnetConfiguration, **options: object) -> ec2.Vpc:
    return ec2.Vpc(stack, "Vpc", subnet_configuration=list(subnets), restrict_default_security_group=False, **options)


PUBLIC = ec2.SubnetConfiguration(name="Open", subnet_type=ec2.SubnetType.PUBLIC)
PRIVATE = ec2.SubnetConfiguration(name="Closed", subnet_type=ec2.SubnetType.PRIVATE_WITH_EGRESS)


def test_an_existing_vpc_is_taken_as_it_is(stack):
    vpc = vpc_in(stack, PUBLIC, PRIVATE, availability_zones=["eu-west-1a", "eu-west-1b"])
    network = TrainingNetwork(stack, "Network", vpc=vpc, availability_zone="eu-west-1b")
    assert network.subnet.node.path == vpc.private_subnets[1].node.path
    assert network.node.children == []


def test_net_05_a_vpc_without_private_subnets_is_refused(stack):
    vpc = vpc_in(stack, PUBLIC, nat_gateways=0)
    with pytest.raises(ValueError, match=r"no private subnet.*no public address.*Session Manager"):
        TrainingNetwork(stack, "Network", vpc=vpc)


def test_a_zone_that_the_vpc_is_not_in_is_refused(stack):
    vpc = vpc_in(stack, PUBLIC, PRIVATE, availability_zones=["eu-west-1a"])
    with pytest.raises(ValueError, match=r"'eu-west-1c', where the VPC has no private subnet. It has some in: eu-west-1a"):
        TrainingNetwork(stack, "Network", vpc=vpc, availability_zone="eu-west-1c")


@pytest.mark.parametrize("options", [{"isolated": True}, {"cidr": "10.1.0.0/16"}])
def test_settings_that_would_be_ignored_are_refused(options, stack):
    vpc = vpc_in(stack, PUBLIC, PRIVATE)
    with pytest.raises(ValueError, match="isolated and cidr describe a VPC that is to be made"):
        TrainingNetwork(stack, "Network", vpc=vpc, **options)
