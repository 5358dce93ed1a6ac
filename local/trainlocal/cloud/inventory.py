"""What exists in the emulated account, asked of the services themselves and not of CloudFormation's books."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainlocal.cloud.clients import Clients

Listing = Callable[[Any], list[str]]


def resources(clients: Clients, region: str) -> dict[str, list[str]]:
    """The names or ids of everything in one region by type; types of which there is nothing are left out.

    What every account has from the start (the default VPC with its parts, AWS's own images, policies, parameters and keys)
    and what is only remembered as deleted is not listed.
    """
    found = {}
    for name, (service, listing) in _LISTINGS.items():
        names = sorted(listing(clients.client(service, region)))
        if names:
            found[name] = names
    return found


def _pages(client: Any, operation: str, key: str, **request: Any) -> list[dict[str, Any]]:
    if not client.can_paginate(operation):
        items: list[dict[str, Any]] = getattr(client, operation)(**request)[key]
        return items
    return [item for page in client.get_paginator(operation).paginate(**request) for item in page.get(key, [])]


def _plain(operation: str, key: str, name: str) -> Listing:
    return lambda client: [item[name] for item in _pages(client, operation, key)]


def _default_vpcs(client: Any) -> set[str]:
    return {vpc["VpcId"] for vpc in client.describe_vpcs()["Vpcs"] if vpc["IsDefault"]}


def _in_vpcs(operation: str, key: str, name: str, *, live: Callable[[dict[str, Any]], bool] = lambda _: True) -> Listing:
    """Parts of VPCs other than the default one."""

    def listing(client: Any) -> list[str]:
        default = _default_vpcs(client)
        return [item[name] for item in _pages(client, operation, key) if item.get("VpcId") not in default and live(item)]

    return listing


def _internet_gateways(client: Any) -> list[str]:
    default = _default_vpcs(client)
    return [
        gateway["InternetGatewayId"]
        for gateway in _pages(client, "describe_internet_gateways", "InternetGateways")
        if not default & {attachment["VpcId"] for attachment in gateway["Attachments"]}
    ]


def _instances(client: Any) -> list[str]:
    return [
        instance["InstanceId"]
        for reservation in _pages(client, "describe_instances", "Reservations")
        for instance in reservation["Instances"]
        if instance["State"]["Name"] != "terminated"
    ]


def _roles(client: Any) -> list[str]:
    roles = _pages(client, "list_roles", "Roles")
    return [role["RoleName"] for role in roles if not role["Path"].startswith("/aws-service-role/")]


def _policies(client: Any) -> list[str]:
    return [policy["Arn"] for policy in _pages(client, "list_policies", "Policies", Scope="Local")]


def _keys(client: Any) -> list[str]:
    """Keys of the user's own: those that AWS made for a service have one of AWS's aliases."""
    of_aws = {alias.get("TargetKeyId") for alias in _pages(client, "list_aliases", "Aliases") if _is_aws_alias(alias)}
    described = [client.describe_key(KeyId=key["KeyId"])["KeyMetadata"] for key in _pages(client, "list_keys", "Keys")]
    return [key["KeyId"] for key in described if key["KeyId"] not in of_aws and key["KeyState"] != "PendingDeletion"]


def _is_aws_alias(alias: dict[str, Any]) -> bool:
    return str(alias["AliasName"]).startswith("alias/aws/")


def _aliases(client: Any) -> list[str]:
    return [alias["AliasName"] for alias in _pages(client, "list_aliases", "Aliases") if not _is_aws_alias(alias)]


def _parameters(client: Any) -> list[str]:
    parameters = _pages(client, "describe_parameters", "Parameters")
    return [parameter["Name"] for parameter in parameters if not parameter["Name"].startswith("/aws/")]


def _alarms(client: Any) -> list[str]:
    return [alarm["AlarmName"] for alarm in _pages(client, "describe_alarms", "MetricAlarms")]


def _stacks(client: Any) -> list[str]:
    return [stack["StackName"] for stack in _pages(client, "describe_stacks", "Stacks")]


_LISTINGS: dict[str, tuple[str, Listing]] = {
    "AWS::AutoScaling::AutoScalingGroup": (
        "autoscaling",
        _plain("describe_auto_scaling_groups", "AutoScalingGroups", "AutoScalingGroupName"),
    ),
    "AWS::CloudFormation::Stack": ("cloudformation", _stacks),
    "AWS::CloudWatch::Alarm": ("cloudwatch", _alarms),
    "AWS::CloudWatch::Dashboard": ("cloudwatch", _plain("list_dashboards", "DashboardEntries", "DashboardName")),
    "AWS::EC2::EIP": ("ec2", _plain("describe_addresses", "Addresses", "PublicIp")),
    "AWS::EC2::FlowLog": ("ec2", _plain("describe_flow_logs", "FlowLogs", "FlowLogId")),
    "AWS::EC2::Instance": ("ec2", _instances),
    "AWS::EC2::InternetGateway": ("ec2", _internet_gateways),
    "AWS::EC2::LaunchTemplate": ("ec2", _plain("describe_launch_templates", "LaunchTemplates", "LaunchTemplateId")),
    "AWS::EC2::NatGateway": (
        "ec2",
        _in_vpcs("describe_nat_gateways", "NatGateways", "NatGatewayId", live=lambda gateway: gateway["State"] != "deleted"),
    ),
    "AWS::EC2::NetworkInterface": ("ec2", _in_vpcs("describe_network_interfaces", "NetworkInterfaces", "NetworkInterfaceId")),
    "AWS::EC2::PlacementGroup": ("ec2", _plain("describe_placement_groups", "PlacementGroups", "GroupName")),
    "AWS::EC2::RouteTable": ("ec2", _in_vpcs("describe_route_tables", "RouteTables", "RouteTableId")),
    "AWS::EC2::SecurityGroup": (
        "ec2",
        _in_vpcs("describe_security_groups", "SecurityGroups", "GroupId", live=lambda group: group["GroupName"] != "default"),
    ),
    "AWS::EC2::Subnet": ("ec2", _in_vpcs("describe_subnets", "Subnets", "SubnetId")),
    "AWS::EC2::VPC": ("ec2", _in_vpcs("describe_vpcs", "Vpcs", "VpcId")),
    "AWS::EC2::VPCEndpoint": (
        "ec2",
        _in_vpcs("describe_vpc_endpoints", "VpcEndpoints", "VpcEndpointId", live=lambda endpoint: endpoint["State"] != "deleted"),
    ),
    "AWS::EC2::Volume": ("ec2", _plain("describe_volumes", "Volumes", "VolumeId")),
    "AWS::EFS::FileSystem": ("efs", _plain("describe_file_systems", "FileSystems", "FileSystemId")),
    "AWS::ECR::Repository": ("ecr", _plain("describe_repositories", "repositories", "repositoryName")),
    "AWS::FSx::DataRepositoryAssociation": (
        "fsx",
        _plain("describe_data_repository_associations", "Associations", "AssociationId"),
    ),
    "AWS::FSx::FileSystem": ("fsx", _plain("describe_file_systems", "FileSystems", "FileSystemId")),
    "AWS::IAM::InstanceProfile": ("iam", _plain("list_instance_profiles", "InstanceProfiles", "InstanceProfileName")),
    "AWS::IAM::ManagedPolicy": ("iam", _policies),
    "AWS::IAM::Role": ("iam", _roles),
    "AWS::KMS::Alias": ("kms", _aliases),
    "AWS::KMS::Key": ("kms", _keys),
    "AWS::Logs::LogGroup": ("logs", _plain("describe_log_groups", "logGroups", "logGroupName")),
    "AWS::S3::Bucket": ("s3", _plain("list_buckets", "Buckets", "Name")),
    "AWS::SNS::Topic": ("sns", _plain("list_topics", "Topics", "TopicArn")),
    "AWS::SSM::Parameter": ("ssm", _parameters),
}
