"""The network of a training cluster: private subnets in one Availability Zone."""

from __future__ import annotations

from aws_cdk import Acknowledgment, Validations
from aws_cdk import aws_ec2 as ec2

from constructs import Construct, IDependable

DEFAULT_CIDR = "10.0.0.0/16"

# What a node talks to besides S3. `monitoring` and `kms` are for metrics and encrypted buckets.
NODE_ENDPOINTS = ("autoscaling", "ec2", "ec2messages", "kms", "logs", "monitoring", "ssm", "ssmmessages", "sts")


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
        availability_zone: str | None = None,
        isolated: bool = False,
        cidr: str | None = None,
    ) -> None:
        """Make a VPC, or take one that exists.

        Args:
            scope: where the construct goes.
            construct_id: its id there.
            vpc: a VPC to use instead of making one; it has to have private subnets, and a way for nodes to reach S3
                and the AWS APIs. Everything else here then does not apply, except ``availability_zone``.
            availability_zone: name of the zone, such as "us-east-1b". None means the first that the account is shown,
                which need not offer the instance type.
            isolated: True leaves out the internet gateway and NAT, and makes interface endpoints for the AWS APIs that
                a node calls. Nodes then reach nothing else: no package index, no other site.
            cidr: address range of the VPC; default 10.0.0.0/16. A /16 holds the nodes of one EFA file system.

        Raises:
            ValueError: a given VPC without private subnets (in the zone), or ``isolated`` or ``cidr`` beside one.
        """
        super().__init__(scope, construct_id)
        self.is_isolated = isolated
        self._ready: list[IDependable] = []
        if vpc is not None:
            if isolated or cidr is not None:
                raise ValueError("isolated and cidr describe a VPC that is to be made, but vpc is given. Leave them out, or vpc.")
            self.vpc = vpc
            self.subnet = _private_subnet(vpc, availability_zone)
            return
        cidr = cidr or DEFAULT_CIDR
        made = ec2.Vpc(
            self,
            "Vpc",
            ip_addresses=ec2.IpAddresses.cidr(cidr),
            availability_zones=[availability_zone] if availability_zone else None,
            max_azs=None if availability_zone else 1,
            nat_gateways=0 if isolated else 1,
            subnet_configuration=_subnets(isolated),
            # Closing the VPC's default group takes a Lambda-backed resource; nothing here uses that group.
            restrict_default_security_group=False,
        )
        self.vpc = made
        self.subnet = (made.isolated_subnets if isolated else made.private_subnets)[0]
        self._ready.append(self.subnet.internet_connectivity_established)
        self._ready.append(
            made.add_gateway_endpoint(
                "S3", service=ec2.GatewayVpcEndpointAwsService.S3, subnets=[ec2.SubnetSelection(subnets=[self.subnet])]
            )
        )
        if isolated:
            self._add_interface_endpoints(made, cidr)
        Validations.of(made).acknowledge(
            Acknowledgment(
                id="AwsSolutions-VPC7",
                reason="Nodes talk to each other and to S3: flow logs would be large and tell little. add_flow_log() adds them.",
            )
        )

    @property
    def ready(self) -> list[IDependable]:
        """What must exist before a node starts: routes and endpoints."""
        return list(self._ready)

    def _add_interface_endpoints(self, vpc: ec2.Vpc, cidr: str) -> None:
        group = ec2.SecurityGroup(
            self, "EndpointsSecurityGroup", vpc=vpc, description="AWS API endpoints, for the nodes", allow_all_outbound=False
        )
        group.add_ingress_rule(ec2.Peer.ipv4(cidr), ec2.Port.HTTPS, "HTTPS from within the VPC")
        for name in NODE_ENDPOINTS:
            endpoint = vpc.add_interface_endpoint(
                name.capitalize(),
                service=ec2.InterfaceVpcEndpointAwsService(name),
                subnets=ec2.SubnetSelection(subnets=[self.subnet]),
                security_groups=[group],
                open=False,
            )
            self._ready.append(endpoint)


def _subnets(isolated: bool) -> list[ec2.SubnetConfiguration]:
    """One large subnet for nodes; beside it, unless isolated, a small public one that only the NAT gateway is in."""
    if isolated:
        return [ec2.SubnetConfiguration(name="Nodes", subnet_type=ec2.SubnetType.PRIVATE_ISOLATED, cidr_mask=18)]
    return [
        ec2.SubnetConfiguration(name="Nodes", subnet_type=ec2.SubnetType.PRIVATE_WITH_EGRESS, cidr_mask=18),
        ec2.SubnetConfiguration(name="Nat", subnet_type=ec2.SubnetType.PUBLIC, cidr_mask=28, map_public_ip_on_launch=False),
    ]


def _private_subnet(vpc: ec2.IVpc, availability_zone: str | None) -> ec2.ISubnet:
    private = [*vpc.private_subnets, *vpc.isolated_subnets]
    if not private:
        raise ValueError(
            "The VPC has no private subnet. Nodes with several network interfaces get no public address from EC2, so they need a "
            "private subnet with a NAT gateway or VPC endpoints; Session Manager reaches them there."
        )
    if availability_zone is None:
        return private[0]
    for subnet in private:
        if subnet.availability_zone == availability_zone:
            return subnet
    zones = ", ".join(sorted({subnet.availability_zone for subnet in private}))
    raise ValueError(f"availability_zone is {availability_zone!r}, where the VPC has no private subnet. It has some in: {zones}.")
