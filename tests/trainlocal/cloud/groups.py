"""A group of nodes as a template, and what becomes of it."""

from __future__ import annotations

from typing import Any

IMAGE = "/aws/service/deeplearning/ami/{}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"


def cluster(data: dict[str, Any], *, minimum: int, desired: int, architecture: str = "x86_64") -> dict[str, Any]:
    return {
        "Parameters": {
            "Image": {"Type": "AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>", "Default": IMAGE.format(architecture)}
        },
        "Resources": {
            "Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.5.0.0/16"}},
            "Subnet": {"Type": "AWS::EC2::Subnet", "Properties": {"CidrBlock": "10.5.1.0/24", "VpcId": {"Ref": "Vpc"}}},
            "Security": {
                "Type": "AWS::EC2::SecurityGroup",
                "Properties": {"GroupDescription": "nodes", "VpcId": {"Ref": "Vpc"}},
            },
            "Near": {"Type": "AWS::EC2::PlacementGroup", "Properties": {"Strategy": "cluster"}},
            "Role": {"Type": "AWS::IAM::Role", "Properties": {"AssumeRolePolicyDocument": {"Statement": []}}},
            "Profile": {"Type": "AWS::IAM::InstanceProfile", "Properties": {"Roles": [{"Ref": "Role"}]}},
            "Template": {
                "Type": "AWS::EC2::LaunchTemplate",
                "Properties": {"LaunchTemplateData": {"ImageId": {"Ref": "Image"}, "InstanceType": "c7i.large", **data}},
            },
            "Group": {
                "Type": "AWS::AutoScaling::AutoScalingGroup",
                "Properties": {
                    "MinSize": str(minimum),
                    "MaxSize": "4",
                    "DesiredCapacity": str(desired),
                    "VPCZoneIdentifier": [{"Ref": "Subnet"}],
                    "LaunchTemplate": {
                        "LaunchTemplateId": {"Ref": "Template"},
                        "Version": {"Fn::GetAtt": ["Template", "LatestVersionNumber"]},
                    },
                },
                "UpdatePolicy": {"AutoScalingRollingUpdate": {"MaxBatchSize": 2, "MinInstancesInService": 0}},
            },
        },
        "Outputs": {"Group": {"Value": {"Ref": "Group"}}},
    }


def members(cloud, stack) -> list[dict[str, Any]]:
    name = stack.physical("Group")
    found = cloud.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"]
    instances: list[dict[str, Any]] = found[0]["Instances"]
    return instances


def described(cloud, instance_id: str) -> dict[str, Any]:
    reservations = cloud.client("ec2").describe_instances(InstanceIds=[instance_id])["Reservations"]
    instance: dict[str, Any] = reservations[0]["Instances"][0]
    return instance
