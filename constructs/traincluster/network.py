"""The network of a training cluster: private subnets in one Availability Zone."""

from __future__ import annotations

import ipaddress

from aws_cdk import Acknowledgment, RemovalPolicy, Stack, Token, Validations
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_logs as logs

from constructs import Construct, IDependable
from traincluster.instances import instance_type as look_up
from traincluster.instances import is_zone_id, offered_zones

DEFAULT_CIDR = "10.0.0.0/16"
SMALLEST_PREFIX, LARGEST_PREFIX = 26, 16
"""The prefixes of a VPC that is made here: EC2's largest, and the smallest with room for nodes beside a NAT gateway."""

NODE_ENDPOINTS = ("autoscaling", "ec2", "ec2messages", "logs", "ssm", "ssmmessages", "sts")
"""What every node talks to besides S3; in an isolated network each is an interface endpoint. `monitoring`, `kms` and `fsx` come
as used."""

_NAT_PREFIX = 28


class TrainingNetwork(Construct):
    """Private subnets in one Availability Zone, with a way to S3 that costs nothing.

    One zone, because EFA traffic does not leave a zone and a cluster placement group cannot. Nodes have no public
    address: EC2 assigns none to an instance with several interfaces, and Session Manager needs none.

    Example:
        >>> network = TrainingNetwork(stack, "Network")                               # doctest: +SKIP
        >>> network = TrainingNetwork(stack, "Network", vpc=existing_vpc)             # doctest: +SKIP
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        vpc: ec2.IVpc | None = None,
        subnet: ec2.ISubnet | None = None,
        availability_zone: str | None = None,
        instance_type: str | None = None,
        isolated: bool = False,
        cidr: str | None = None,
        flow_logs: logs.RetentionDays | None = None,
    ) -> None:
        """Make a VPC, or take one that exists.

        Args:
            scope: where the construct goes.
            construct_id: its id there.
            vpc: a VPC to use instead of making one; it has to have private subnets, and a way for nodes to reach S3
                and the AWS APIs.
            subnet: the subnet of that VPC for the nodes; None means its first private one (in the zone).
            availability_zone: the zone by name ("us-east-1b") or, for a VPC that is made, by id ("use1-az4"), which means
                the same place in every account. None leaves the choice to ``instance_type``.
            instance_type: the type that the network is for. Where no zone is named and the stack's region is known at
                synth, the first zone of the region that offers the type is chosen, by a snapshot without a date
                (`traincluster.instances.offerings`). Without it, or where the snapshot knows nothing, the zone is the first
                that the account is shown, which need not offer the type.
            isolated: True leaves out the internet gateway and NAT, and makes interface endpoints for the AWS APIs that
                a node calls. Nodes then reach nothing else: no package index, no other site.
            cidr: address range of the VPC, /16 to /26; default 10.0.0.0/16. Half of it is the nodes' subnet.
            flow_logs: how long records of the network's traffic are kept; None means that none are made.

        Raises:
            ValueError: a given VPC without any subnet (in the zone), settings that would be ignored beside it, or a range
                that EC2 does not take.
        """
        super().__init__(scope, construct_id)
        _check_zone(availability_zone)
        self.is_isolated = isolated
        self.named_zone = availability_zone
        """The zone as it was named; None when it was not."""
        self._endpoints: dict[str, ec2.InterfaceVpcEndpoint] = {}
        self._endpoint_group: ec2.SecurityGroup | None = None
        self._ready: list[IDependable] = []
        if vpc is None:
            if subnet is not None:
                raise ValueError("subnet is given without vpc. Give the VPC that it is in as well.")
            self._make(availability_zone, instance_type, cidr=_checked_cidr(cidr or DEFAULT_CIDR))
        else:
            self._adopt(vpc, subnet, availability_zone, ignored=isolated or cidr is not None or instance_type is not None)
        if flow_logs is not None:
            self._add_flow_logs(flow_logs)
        elif vpc is None:
            Validations.of(self.vpc).acknowledge(
                Acknowledgment(
                    id="AwsSolutions-VPC7",
                    reason="Nodes talk to each other and to S3: flow logs would be large and tell little. flow_logs adds them.",
                )
            )

    @property
    def ready(self) -> list[IDependable]:
        """What must exist before a node starts: routes and endpoints."""
        return list(self._ready)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The AWS services that have an interface endpoint here, each of which takes an address of the subnet."""
        return tuple(self._endpoints)

    def add_endpoint(self, service: str) -> None:
        """Let nodes of an isolated network reach one more AWS service, such as "fsx"; elsewhere nothing is needed.

        Args:
            service: the end of the service's endpoint name, com.amazonaws.REGION.SERVICE.
        """
        if not self.is_isolated or service in self._endpoints:
            return
        assert self._endpoint_group is not None
        endpoint = self.vpc.add_interface_endpoint(
            service.capitalize(),
            service=ec2.InterfaceVpcEndpointAwsService(service),
            subnets=ec2.SubnetSelection(subnets=[self.subnet]),
            security_groups=[self._endpoint_group],
            open=False,
        )
        self._endpoints[service] = endpoint
        self._ready.append(endpoint)

    def _make(self, zone: str | None, instance_type: str | None, *, cidr: ipaddress.IPv4Network) -> None:
        chosen = zone or _zone_that_offers(instance_type, region=Stack.of(self).region)
        by_name = chosen if chosen is not None and not is_zone_id(chosen) else None
        made = ec2.Vpc(
            self,
            "Vpc",
            ip_addresses=ec2.IpAddresses.cidr(str(cidr)),
            availability_zones=[by_name] if by_name else None,
            max_azs=None if by_name else 1,
            nat_gateways=0 if self.is_isolated else 1,
            subnet_configuration=_subnets(cidr, isolated=self.is_isolated),
            # Closing the VPC's default group takes a Lambda-backed resource; nothing here uses that group.
            restrict_default_security_group=False,
        )
        if chosen is not None and by_name is None:
            for each in (*made.private_subnets, *made.isolated_subnets, *made.public_subnets):
                _place_by_id(each, chosen)
        self.vpc: ec2.IVpc = made
        self.subnet: ec2.ISubnet = (made.isolated_subnets if self.is_isolated else made.private_subnets)[0]
        self.zone_is_given = zone is not None
        """Whether the zone was named, or comes with the user's own VPC."""
        self.zone_is_chosen = zone is None and chosen is not None
        """Whether it was chosen from where the type is offered."""
        self.subnet_is_public = False
        self.subnet_cidr: str | None = str(next(cidr.subnets(new_prefix=cidr.prefixlen + 1)))
        """The address range of the nodes' subnet; None when it is not known at synth."""
        self._ready.append(self.subnet.internet_connectivity_established)
        self._ready.append(
            made.add_gateway_endpoint(
                "S3", service=ec2.GatewayVpcEndpointAwsService.S3, subnets=[ec2.SubnetSelection(subnets=[self.subnet])]
            )
        )
        if self.is_isolated:
            self._endpoint_group = ec2.SecurityGroup(
                self, "EndpointsSecurityGroup", vpc=made, description="AWS API endpoints, for the nodes", allow_all_outbound=False
            )
            self._endpoint_group.add_ingress_rule(ec2.Peer.ipv4(str(cidr)), ec2.Port.HTTPS, "HTTPS from within the VPC")
            for name in NODE_ENDPOINTS:
                self.add_endpoint(name)

    def _adopt(self, vpc: ec2.IVpc, subnet: ec2.ISubnet | None, zone: str | None, *, ignored: bool) -> None:
        if ignored:
            raise ValueError(
                "isolated, cidr and instance_type describe a VPC that is to be made, but vpc is given. Leave them out, or vpc."
            )
        if subnet is not None and zone is not None:
            raise ValueError("subnet and availability_zone are both given, but a subnet is in one zone. Leave one of them out.")
        self.vpc = vpc
        self.subnet = subnet or _subnet_of(vpc, zone)
        self.zone_is_given, self.zone_is_chosen = True, False
        self.subnet_is_public = self.subnet.node.path in {each.node.path for each in vpc.public_subnets}
        self.subnet_cidr = _cidr_of(self.subnet)

    def _add_flow_logs(self, retention: logs.RetentionDays) -> None:
        group = logs.LogGroup(self, "FlowLogGroup", retention=retention, removal_policy=RemovalPolicy.DESTROY)
        ec2.FlowLog(
            self,
            "FlowLog",
            resource_type=ec2.FlowLogResourceType.from_vpc(self.vpc),
            destination=ec2.FlowLogDestination.to_cloud_watch_logs(group),
        )


def _checked_cidr(cidr: str) -> ipaddress.IPv4Network:
    try:
        network = ipaddress.IPv4Network(cidr)
    except ValueError:
        network = None
    if network is None or not LARGEST_PREFIX <= network.prefixlen <= SMALLEST_PREFIX:
        raise ValueError(
            f"cidr is {cidr!r}. Allowed: an IPv4 range of /{LARGEST_PREFIX} to /{SMALLEST_PREFIX} whose address is the first of "
            f"the range, such as '{DEFAULT_CIDR}'."
        )
    return network


def _subnets(cidr: ipaddress.IPv4Network, *, isolated: bool) -> list[ec2.SubnetConfiguration]:
    """Half of the range for the nodes; beside it, unless isolated, a small public subnet that only the NAT gateway is in."""
    prefix = cidr.prefixlen + 1
    if isolated:
        return [ec2.SubnetConfiguration(name="Nodes", subnet_type=ec2.SubnetType.PRIVATE_ISOLATED, cidr_mask=prefix)]
    return [
        ec2.SubnetConfiguration(name="Nodes", subnet_type=ec2.SubnetType.PRIVATE_WITH_EGRESS, cidr_mask=prefix),
        ec2.SubnetConfiguration(
            name="Nat", subnet_type=ec2.SubnetType.PUBLIC, cidr_mask=_NAT_PREFIX, map_public_ip_on_launch=False
        ),
    ]


def _zone_that_offers(instance_type: str | None, *, region: str) -> str | None:
    """The first zone of a region that offers a type, by the snapshot of offerings; None where it cannot be told."""
    if instance_type is None or Token.is_unresolved(region):
        return None
    zones = offered_zones(look_up(instance_type).name, region)
    return zones[0] if zones else None


def _place_by_id(subnet: ec2.ISubnet, zone_id: str) -> None:
    """Put a subnet into a zone by the zone's id, for which the L2 has no property."""
    resource = subnet.node.default_child
    assert isinstance(resource, ec2.CfnSubnet)
    resource.availability_zone = None
    resource.availability_zone_id = zone_id


def _check_zone(zone: str | None) -> None:
    """A zone's name ends in a letter that its region's does not have."""
    if zone is None or Token.is_unresolved(zone) or is_zone_id(zone) or zone[-1:].isalpha():
        return
    raise ValueError(
        f"availability_zone is {zone!r}, which is no zone. Allowed: a name such as 'us-east-1b', or an id such as 'use1-az4'."
    )


def _subnet_of(vpc: ec2.IVpc, zone: str | None) -> ec2.ISubnet:
    """The nodes' subnet in a VPC that exists: the first private one in the zone, else a public one, which a rule refuses."""
    private = [*vpc.private_subnets, *vpc.isolated_subnets]
    subnets = private or list(vpc.public_subnets)
    if not subnets:
        raise ValueError("The VPC has no subnet. Give one with a private subnet that reaches S3 and the AWS APIs.")
    if zone is None:
        return subnets[0]
    for subnet in subnets:
        if subnet.availability_zone == zone:
            return subnet
    zones = ", ".join(sorted({subnet.availability_zone for subnet in subnets}))
    by_id = " A VPC that exists knows its zones by name, not by id." if is_zone_id(zone) else ""
    kind = "private subnet" if private else "subnet"
    raise ValueError(f"availability_zone is {zone!r}, where the VPC has no {kind}. It has some in: {zones}.{by_id}")


def _cidr_of(subnet: ec2.ISubnet) -> str | None:
    """The subnet's range, where the app knows it: a subnet taken by its id alone refuses the question."""
    try:
        cidr = subnet.ipv4_cidr_block
    except RuntimeError:
        return None
    return None if Token.is_unresolved(cidr) else cidr
