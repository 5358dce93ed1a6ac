"""The network: one zone, private subnets, a way to S3, and no look-ups."""

from __future__ import annotations

import aws_cdk as cdk
import pytest
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk.assertions import Template

from traincluster import CheckpointBucket, TrainingCluster, TrainingJob, TrainingNetwork


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
    wanted = {"ssm", "ssmmessages", "ec2messages", "ec2", "autoscaling", "logs", "monitoring", "sts", "s3"}
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


def test_net_05_a_vpc_without_private_subnets_stops_the_synth(stack):
    vpc = vpc_in(stack, PUBLIC, nat_gateways=0)
    assert cluster_errors(stack, TrainingNetwork(stack, "Network", vpc=vpc), "p4d.24xlarge") == [
        "The nodes are in a public subnet, but EC2 assigns no public address to p4d.24xlarge with its 5 network interfaces, and "
        "without one an internet gateway lets nothing through. Use a private subnet with a NAT gateway or VPC endpoints; Session "
        "Manager reaches the nodes there. [nodes-need-private-subnet]"
    ]


def test_net_05_a_public_subnet_stops_the_synth_whatever_the_type(stack):
    vpc = vpc_in(stack, PUBLIC, PRIVATE)
    network = TrainingNetwork(stack, "Network", vpc=vpc, subnet=vpc.public_subnets[0])
    (error,) = cluster_errors(stack, network, "c7i.2xlarge")
    assert "but nodes get no public address" in error and "[nodes-need-private-subnet]" in error


def cluster_errors(stack: cdk.Stack, network: TrainingNetwork, instance_type: str, **arguments: object) -> list[str]:
    """What synth would be stopped by, for a cluster in the network."""
    cluster = TrainingCluster(
        stack,
        "Cluster",
        network=network,
        instance_type=instance_type,
        checkpoints=CheckpointBucket(stack, "Checkpoints"),
        job=TrainingJob(run="r"),
        **{"nodes": 2, **arguments},
    )
    return list(cluster.node.validate())


def test_a_subnet_of_ones_own_vpc(stack):
    vpc = vpc_in(stack, PUBLIC, PRIVATE, availability_zones=["eu-west-1a", "eu-west-1b"])
    network = TrainingNetwork(stack, "Network", vpc=vpc, subnet=vpc.private_subnets[1])
    assert network.subnet.node.path == vpc.private_subnets[1].node.path
    assert cluster_errors(stack, network, "p4d.24xlarge") == []


def test_a_zone_that_the_vpc_is_not_in_is_refused(stack):
    vpc = vpc_in(stack, PUBLIC, PRIVATE, availability_zones=["eu-west-1a"])
    with pytest.raises(ValueError, match=r"'eu-west-1c', where the VPC has no private subnet. It has some in: eu-west-1a"):
        TrainingNetwork(stack, "Network", vpc=vpc, availability_zone="eu-west-1c")


def test_a_zone_id_is_refused_for_a_vpc_that_exists(stack):
    vpc = vpc_in(stack, PUBLIC, PRIVATE, availability_zones=["eu-west-1a"])
    with pytest.raises(ValueError, match="knows its zones by name, not by id"):
        TrainingNetwork(stack, "Network", vpc=vpc, availability_zone="euw1-az1")


@pytest.mark.parametrize("options", [{"isolated": True}, {"cidr": "10.1.0.0/16"}, {"instance_type": "p5.48xlarge"}])
def test_settings_that_would_be_ignored_are_refused(options, stack):
    vpc = vpc_in(stack, PUBLIC, PRIVATE)
    with pytest.raises(ValueError, match="isolated, cidr and instance_type describe a VPC that is to be made"):
        TrainingNetwork(stack, "Network", vpc=vpc, **options)


def test_a_subnet_needs_its_vpc_and_no_zone(stack):
    vpc = vpc_in(stack, PUBLIC, PRIVATE)
    with pytest.raises(ValueError, match="subnet is given without vpc"):
        TrainingNetwork(stack, "A", subnet=vpc.private_subnets[0])
    with pytest.raises(ValueError, match="Leave one of them out"):
        TrainingNetwork(stack, "B", vpc=vpc, subnet=vpc.private_subnets[0], availability_zone="us-east-1a")


@pytest.mark.parametrize("cidr", ["10.0.0.0/15", "10.0.0.0/27", "10.0.0.1/16", "10.0.0.0", "everywhere", "fd00::/56"])
def test_a_range_that_no_vpc_can_have_is_refused(cidr, stack):
    with pytest.raises(ValueError, match=r"cidr is .*Allowed: an IPv4 range of /16 to /26"):
        TrainingNetwork(stack, "Network", cidr=cidr)


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("cidr", ["10.0.0.0/16", "172.16.0.0/20", "192.168.7.0/24", "10.9.8.64/26"])
def test_half_of_the_range_is_the_nodes(cidr, isolated, synthesize):
    cluster = synthesize(network={"cidr": cidr, "isolated": isolated}, nodes=1)
    (subnet,) = [one for name, one in cluster.resources("AWS::EC2::Subnet").items() if "NodesSubnet" in name]
    whole = cluster.only("AWS::EC2::VPC")["Properties"]["CidrBlock"]
    assert whole == cidr
    assert subnet["Properties"]["CidrBlock"].split("/") == [cidr.split("/")[0], str(int(cidr.split("/")[1]) + 1)]


def zones_of(stack: cdk.Stack) -> set[tuple[str | None, str | None]]:
    """The zones of a stack's subnets, by name and by id."""
    subnets = Template.from_stack(stack).find_resources("AWS::EC2::Subnet").values()
    names = ("AvailabilityZone", "AvailabilityZoneId")
    return {tuple(str(one["Properties"].get(name)) if name in one["Properties"] else None for name in names) for one in subnets}


def test_a_zone_by_id_is_the_same_place_in_every_account(stack):
    TrainingNetwork(stack, "Network", availability_zone="use1-az4")
    assert zones_of(stack) == {(None, "use1-az4")}


def regional_stack(tmp_path, region: str) -> cdk.Stack:
    return cdk.Stack(cdk.App(outdir=str(tmp_path / "assembly")), "Stack", env=cdk.Environment(region=region))


def test_the_zone_is_chosen_from_where_the_type_is_offered(tmp_path):
    stack = regional_stack(tmp_path, "us-east-1")
    network = TrainingNetwork(stack, "Network", instance_type="p5en.48xlarge")
    assert zones_of(stack) == {(None, "use1-az2")}
    assert network.zone_is_chosen and not network.zone_is_given


def test_a_named_zone_goes_before_a_choice(tmp_path):
    stack = regional_stack(tmp_path, "us-east-1")
    TrainingNetwork(stack, "Network", instance_type="p5en.48xlarge", availability_zone="us-east-1b")
    assert zones_of(stack) == {("us-east-1b", None)}


@pytest.mark.parametrize("region", ["us-west-1", "xx-north-7"])
def test_nothing_is_chosen_where_nothing_is_known(region, tmp_path):
    stack = regional_stack(tmp_path, region)
    network = TrainingNetwork(stack, "Network", instance_type="trn2.48xlarge")
    assert not network.zone_is_chosen
    ((name, by_id),) = zones_of(stack)
    assert name is not None and by_id is None


def test_flow_logs_have_a_group_of_their_own_that_goes_with_the_stack(synthesize):
    cluster = synthesize(network={"flow_logs": logs.RetentionDays.ONE_WEEK})
    ((name, group),) = [(key, one) for key, one in cluster.resources("AWS::Logs::LogGroup").items() if "FlowLog" in key]
    assert (group["Properties"], group["DeletionPolicy"]) == ({"RetentionInDays": 7}, "Delete")
    flow_log = cluster.only("AWS::EC2::FlowLog")["Properties"]
    assert (flow_log["ResourceType"], flow_log["TrafficType"], flow_log["LogGroupName"]) == ("VPC", "ALL", {"Ref": name})
    assert not synthesize().resources("AWS::EC2::FlowLog")


def test_net_12_kms_has_an_endpoint_where_a_key_is_used(stack):
    network = TrainingNetwork(stack, "Network", isolated=True)
    assert "kms" not in network.endpoints
    TrainingCluster(
        stack,
        "Cluster",
        network=network,
        instance_type="c7i.2xlarge",
        nodes=1,
        checkpoints=CheckpointBucket(stack, "Checkpoints", encryption_key=kms.Key(stack, "Key")),
        job=TrainingJob(run="r"),
    )
    assert "kms" in network.endpoints


def test_net_12_with_nat_no_endpoint_is_made_however_often_one_is_asked_for(stack):
    network = TrainingNetwork(stack, "Network")
    network.add_endpoint("fsx")
    assert network.endpoints == ()
    isolated = TrainingNetwork(stack, "Isolated", isolated=True)
    isolated.add_endpoint("fsx")
    isolated.add_endpoint("fsx")
    assert isolated.endpoints.count("fsx") == 1
    assert len(isolated.ready) == len(isolated.endpoints) + 2
