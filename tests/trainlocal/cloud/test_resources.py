"""The resource types: what they make in the account, what Ref and GetAtt give, what an update changes, what deletion leaves."""

from __future__ import annotations

import json
from typing import Any

import pytest
from botocore.exceptions import ClientError

from trainlocal.cloud.resources import emulated_types, provider_of

STATEMENT = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
TRUST = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": "ec2.amazonaws.com"}}],
}
NETWORK = {
    "Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.7.0.0/16", "EnableDnsHostnames": "true"}},
    "Subnet": {
        "Type": "AWS::EC2::Subnet",
        "Properties": {
            "VpcId": {"Ref": "Vpc"},
            "CidrBlock": {"Fn::Select": [0, {"Fn::Cidr": [{"Fn::GetAtt": ["Vpc", "CidrBlock"]}, 4, 8]}]},
            "AvailabilityZone": {"Fn::Select": [1, {"Fn::GetAZs": ""}]},
        },
    },
    "Table": {"Type": "AWS::EC2::RouteTable", "Properties": {"VpcId": {"Ref": "Vpc"}}},
    "Uses": {
        "Type": "AWS::EC2::SubnetRouteTableAssociation",
        "Properties": {"RouteTableId": {"Ref": "Table"}, "SubnetId": {"Ref": "Subnet"}},
    },
    "Way": {"Type": "AWS::EC2::InternetGateway"},
    "Joined": {
        "Type": "AWS::EC2::VPCGatewayAttachment",
        "Properties": {"InternetGatewayId": {"Ref": "Way"}, "VpcId": {"Ref": "Vpc"}},
    },
    "Out": {
        "Type": "AWS::EC2::Route",
        "DependsOn": "Joined",
        "Properties": {"RouteTableId": {"Ref": "Table"}, "DestinationCidrBlock": "0.0.0.0/0", "GatewayId": {"Ref": "Way"}},
    },
    "Address": {"Type": "AWS::EC2::EIP", "Properties": {"Domain": "vpc"}},
    "Nat": {
        "Type": "AWS::EC2::NatGateway",
        "DependsOn": "Out",
        "Properties": {"AllocationId": {"Fn::GetAtt": ["Address", "AllocationId"]}, "SubnetId": {"Ref": "Subnet"}},
    },
    "Private": {"Type": "AWS::EC2::NatGateway", "Properties": {"ConnectivityType": "private", "SubnetId": {"Ref": "Subnet"}}},
    "Storage": {
        "Type": "AWS::EC2::VPCEndpoint",
        "Properties": {
            "ServiceName": {"Fn::Sub": "com.amazonaws.${AWS::Region}.s3"},
            "VpcId": {"Ref": "Vpc"},
            "VpcEndpointType": "Gateway",
            "RouteTableIds": [{"Ref": "Table"}],
        },
    },
    "Security": {
        "Type": "AWS::EC2::SecurityGroup",
        "Properties": {
            "GroupDescription": "all",
            "VpcId": {"Ref": "Vpc"},
            "SecurityGroupIngress": [{"CidrIp": "10.7.0.0/16", "IpProtocol": "tcp", "FromPort": 443, "ToPort": "443"}],
        },
    },
    "In": {
        "Type": "AWS::EC2::SecurityGroupIngress",
        "Properties": {
            "GroupId": {"Ref": "Security"},
            "IpProtocol": "-1",
            "SourceSecurityGroupId": {"Fn::GetAtt": ["Security", "GroupId"]},
        },
    },
    "To": {
        "Type": "AWS::EC2::SecurityGroupEgress",
        "Properties": {"GroupId": {"Ref": "Security"}, "IpProtocol": "-1", "DestinationSecurityGroupId": {"Ref": "Security"}},
    },
    "Interface": {
        "Type": "AWS::EC2::VPCEndpoint",
        "Properties": {
            "ServiceName": {"Fn::Sub": "com.amazonaws.${AWS::Region}.ssm"},
            "VpcId": {"Ref": "Vpc"},
            "VpcEndpointType": "Interface",
            "PrivateDnsEnabled": True,
            "SubnetIds": [{"Ref": "Subnet"}],
            "SecurityGroupIds": [{"Ref": "Security"}],
        },
    },
    "Logs": {"Type": "AWS::Logs::LogGroup", "Properties": {"RetentionInDays": 7}},
    "Writer": {"Type": "AWS::IAM::Role", "Properties": {"AssumeRolePolicyDocument": TRUST}},
    "Flow": {
        "Type": "AWS::EC2::FlowLog",
        "Properties": {
            "ResourceId": {"Ref": "Vpc"},
            "ResourceType": "VPC",
            "TrafficType": "ALL",
            "LogGroupName": {"Ref": "Logs"},
            "DeliverLogsPermissionArn": {"Fn::GetAtt": ["Writer", "Arn"]},
        },
    },
}


def outputs(**expressions: Any) -> dict[str, Any]:
    return {name: {"Value": expression} for name, expression in expressions.items()}


def test_a_whole_network_comes_and_goes(own_cloud) -> None:
    formation, ec2 = own_cloud.client("cloudformation"), own_cloud.client("ec2")
    before = own_cloud.resources()
    body = json.dumps({"Resources": NETWORK, "Outputs": outputs(Default={"Fn::GetAtt": ["Vpc", "DefaultSecurityGroup"]})})
    formation.create_stack(StackName="network", TemplateBody=body, Capabilities=["CAPABILITY_IAM"])
    stack = formation.describe_stacks(StackName="network")["Stacks"][0]
    assert stack["StackStatus"] == "CREATE_COMPLETE"
    assert stack["Outputs"][0]["OutputValue"].startswith("sg-")

    found = {
        each["LogicalResourceId"]: each["PhysicalResourceId"]
        for each in formation.describe_stack_resources(StackName="network")["StackResources"]
    }
    subnet = ec2.describe_subnets(SubnetIds=[found["Subnet"]])["Subnets"][0]
    assert (subnet["CidrBlock"], subnet["AvailabilityZone"]) == ("10.7.0.0/24", "us-east-1b")
    routes = ec2.describe_route_tables(RouteTableIds=[found["Table"]])["RouteTables"][0]["Routes"]
    assert found["Way"] in [route.get("GatewayId") for route in routes]
    assert found["Storage"] in [route.get("GatewayId") for route in routes]
    security = ec2.describe_security_groups(GroupIds=[found["Security"]])["SecurityGroups"][0]
    itself = [pair["GroupId"] for rule in security["IpPermissions"] for pair in rule["UserIdGroupPairs"]]
    itself += [pair["GroupId"] for rule in security["IpPermissionsEgress"] for pair in rule["UserIdGroupPairs"]]
    assert itself == [found["Security"], found["Security"]]
    assert len(ec2.describe_nat_gateways()["NatGateways"]) == 2

    formation.delete_stack(StackName="network")
    assert own_cloud.resources() == before


def test_rules_of_a_security_group_follow_its_template(cloud, stack) -> None:
    ec2 = cloud.client("ec2")

    def template(*ports: int) -> dict[str, Any]:
        rules = [{"CidrIp": "10.0.0.0/8", "IpProtocol": "tcp", "FromPort": port, "ToPort": port} for port in ports]
        group = {
            "GroupDescription": "g",
            "VpcId": {"Ref": "Vpc"},
            "SecurityGroupIngress": rules,
            "SecurityGroupEgress": rules[:1],
        }
        return {
            "Resources": {
                "Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.6.0.0/16"}},
                "Group": {"Type": "AWS::EC2::SecurityGroup", "Properties": group},
            }
        }

    stack.create(template(22, 80))
    stack.update(template(443, 80))
    group = ec2.describe_security_groups(GroupIds=[stack.physical("Group")])["SecurityGroups"][0]
    assert sorted(rule["FromPort"] for rule in group["IpPermissions"]) == [80, 443]
    assert [rule["FromPort"] for rule in group["IpPermissionsEgress"]] == [443]
    stack.delete()


def bucket(**properties: Any) -> dict[str, Any]:
    return {
        "Resources": {
            "Key": {"Type": "AWS::KMS::Key", "Properties": {"EnableKeyRotation": True, "KeyPolicy": STATEMENT}},
            "Alias": {
                "Type": "AWS::KMS::Alias",
                "Properties": {"AliasName": {"Fn::Sub": "alias/${AWS::StackName}"}, "TargetKeyId": {"Ref": "Key"}},
            },
            "Bucket": {"Type": "AWS::S3::Bucket", "Properties": properties},
            "Policy": {
                "Type": "AWS::S3::BucketPolicy",
                "Properties": {
                    "Bucket": {"Ref": "Bucket"},
                    "PolicyDocument": {
                        "Statement": [
                            {
                                "Effect": "Deny",
                                "Principal": "*",
                                "Action": "s3:*",
                                "Resource": [{"Fn::GetAtt": ["Bucket", "Arn"]}, {"Fn::Sub": "${Bucket.Arn}/*"}],
                                "Condition": {"Bool": {"aws:SecureTransport": "false"}},
                            }
                        ]
                    },
                },
            },
        },
        "Outputs": outputs(Name={"Ref": "Bucket"}, Domain={"Fn::GetAtt": ["Bucket", "RegionalDomainName"]}),
    }


def test_a_bucket_has_the_settings_of_its_template(cloud, stack) -> None:
    s3, kms = cloud.client("s3"), cloud.client("kms")
    stack.create(
        bucket(
            VersioningConfiguration={"Status": "Enabled"},
            PublicAccessBlockConfiguration={"BlockPublicAcls": True, "BlockPublicPolicy": "true"},
            OwnershipControls={"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]},
            BucketEncryption={
                "ServerSideEncryptionConfiguration": [
                    {
                        "BucketKeyEnabled": True,
                        "ServerSideEncryptionByDefault": {
                            "SSEAlgorithm": "aws:kms",
                            "KMSMasterKeyID": {"Fn::GetAtt": ["Key", "Arn"]},
                        },
                    }
                ]
            },
            LifecycleConfiguration={
                "Rules": [
                    {
                        "Id": "clean",
                        "Status": "Enabled",
                        "Prefix": "run/",
                        "ExpirationInDays": "90",
                        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7},
                        "NoncurrentVersionExpiration": {"NoncurrentDays": 7},
                        "Transitions": [{"StorageClass": "STANDARD_IA", "TransitionInDays": 30}],
                    }
                ]
            },
        )
    )
    name = stack.outputs()["Name"]
    assert name.startswith(f"{stack.name}-bucket-") and name == name.lower()
    assert stack.outputs()["Domain"] == f"{name}.s3.us-east-1.amazonaws.com"
    assert s3.get_bucket_versioning(Bucket=name)["Status"] == "Enabled"
    assert s3.get_public_access_block(Bucket=name)["PublicAccessBlockConfiguration"]["BlockPublicPolicy"] is True
    rule = s3.get_bucket_encryption(Bucket=name)["ServerSideEncryptionConfiguration"]["Rules"][0]
    assert rule["ApplyServerSideEncryptionByDefault"]["KMSMasterKeyID"].endswith(stack.physical("Key"))
    (lifecycle,) = s3.get_bucket_lifecycle_configuration(Bucket=name)["Rules"]
    assert lifecycle["Filter"] == {"Prefix": "run/"}
    assert lifecycle["Expiration"] == {"Days": 90}
    assert lifecycle["Transitions"] == [{"Days": 30, "StorageClass": "STANDARD_IA"}]
    assert lifecycle["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
    assert kms.get_key_rotation_status(KeyId=stack.physical("Key"))["KeyRotationEnabled"] is True
    s3.put_object(Bucket=name, Key="k", Body=b"x")  # the TLS-only policy does not stand in the way

    stack.update(bucket(VersioningConfiguration={"Status": "Suspended"}))
    assert stack.outputs()["Name"] == name
    assert s3.get_bucket_versioning(Bucket=name)["Status"] == "Suspended"
    with pytest.raises(ClientError, match="NoSuchLifecycleConfiguration"):
        s3.get_bucket_lifecycle_configuration(Bucket=name)


def test_a_bucket_name_in_use_fails_and_leaves_the_other_bucket(cloud, stack) -> None:
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket=f"{stack.name}-taken")
    assert (
        stack.create({"Resources": {"B": {"Type": "AWS::S3::Bucket", "Properties": {"BucketName": f"{stack.name}-taken"}}}})
        == "ROLLBACK_COMPLETE"
    )
    assert f"{stack.name}-taken already exists" in stack.reasons()
    assert f"{stack.name}-taken" in cloud.resources()["AWS::S3::Bucket"]


def test_identities_and_their_policies(cloud, stack) -> None:
    iam = cloud.client("iam")

    def template(action: str, *managed: str) -> dict[str, Any]:
        document = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": action, "Resource": "*"}]}
        return {
            "Resources": {
                "Role": {
                    "Type": "AWS::IAM::Role",
                    "Properties": {
                        "AssumeRolePolicyDocument": TRUST,
                        "ManagedPolicyArns": [f"arn:aws:iam::aws:policy/{name}" for name in managed],
                        "Policies": [{"PolicyName": "inline", "PolicyDocument": document}],
                    },
                },
                "Beside": {
                    "Type": "AWS::IAM::Policy",
                    "Properties": {"PolicyName": "beside", "PolicyDocument": document, "Roles": [{"Ref": "Role"}]},
                },
                "Managed": {
                    "Type": "AWS::IAM::ManagedPolicy",
                    "Properties": {"PolicyDocument": document, "Roles": [{"Ref": "Role"}]},
                },
                "Profile": {"Type": "AWS::IAM::InstanceProfile", "Properties": {"Roles": [{"Ref": "Role"}]}},
            },
            "Outputs": outputs(Role={"Fn::GetAtt": ["Role", "Arn"]}, Profile={"Fn::GetAtt": ["Profile", "Arn"]}),
        }

    assert stack.create(template("s3:Get*", "AmazonSSMManagedInstanceCore")) == "CREATE_COMPLETE"
    role, managed = stack.physical("Role"), stack.physical("Managed")
    assert stack.outputs()["Role"] == f"arn:aws:iam::123456789012:role/{role}"
    assert stack.update(template("s3:Put*", "ReadOnlyAccess")) == "UPDATE_COMPLETE", stack.reasons()
    attached = iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]
    assert {policy["PolicyArn"] for policy in attached} == {"arn:aws:iam::aws:policy/ReadOnlyAccess", managed}
    assert set(iam.list_role_policies(RoleName=role)["PolicyNames"]) == {"inline", "beside"}
    for name in ("inline", "beside"):
        document = iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]
        assert document["Statement"][0]["Action"] == "s3:Put*"
    version = iam.get_policy(PolicyArn=managed)["Policy"]["DefaultVersionId"]
    document = iam.get_policy_version(PolicyArn=managed, VersionId=version)["PolicyVersion"]["Document"]
    assert document["Statement"][0]["Action"] == "s3:Put*"
    stack.delete()
    for read in (lambda: iam.get_role(RoleName=role), lambda: iam.get_policy(PolicyArn=managed)):
        with pytest.raises(ClientError, match="NoSuchEntity"):
            read()


def test_alarms_topics_dashboards_repositories_and_the_mark_of_the_cdk(cloud, stack) -> None:
    def template(threshold: int) -> dict[str, Any]:
        return {
            "Resources": {
                "Mark": {"Type": "AWS::CDK::Metadata", "Properties": {"Analytics": f"v{threshold}"}},
                "Topic": {"Type": "AWS::SNS::Topic", "Properties": {"DisplayName": f"d{threshold}"}},
                "Hears": {
                    "Type": "AWS::SNS::Subscription",
                    "Properties": {"TopicArn": {"Ref": "Topic"}, "Protocol": "email", "Endpoint": "someone@example.com"},
                },
                "May": {
                    "Type": "AWS::SNS::TopicPolicy",
                    "Properties": {"PolicyDocument": STATEMENT, "Topics": [{"Ref": "Topic"}]},
                },
                "Alarm": {
                    "Type": "AWS::CloudWatch::Alarm",
                    "Properties": {
                        "ComparisonOperator": "LessThanThreshold",
                        "EvaluationPeriods": 3,
                        "Threshold": threshold,
                        "Namespace": "n",
                        "MetricName": "m",
                        "Period": 60,
                        "Statistic": "Average",
                        "Dimensions": [{"Name": "Group", "Value": "g"}],
                        "AlarmActions": [{"Ref": "Topic"}],
                    },
                },
                "Page": {"Type": "AWS::CloudWatch::Dashboard", "Properties": {"DashboardBody": '{"widgets": []}'}},
                "Images": {
                    "Type": "AWS::ECR::Repository",
                    "Properties": {"ImageTagMutability": "IMMUTABLE", "RepositoryPolicyText": STATEMENT},
                },
            },
            "Outputs": outputs(Alarm={"Fn::GetAtt": ["Alarm", "Arn"]}, Images={"Fn::GetAtt": ["Images", "Arn"]}),
        }

    assert stack.create(template(5)) == "CREATE_COMPLETE"
    assert stack.update(template(7)) == "UPDATE_COMPLETE"
    alarm = cloud.client("cloudwatch").describe_alarms(AlarmNames=[stack.physical("Alarm")])["MetricAlarms"][0]
    assert alarm["Threshold"] == 7
    assert alarm["AlarmArn"] == stack.outputs()["Alarm"]
    attributes = cloud.client("sns").get_topic_attributes(TopicArn=stack.physical("Topic"))["Attributes"]
    assert attributes["DisplayName"] == "d7"
    repository = cloud.client("ecr").describe_repositories(repositoryNames=[stack.physical("Images")])["repositories"][0]
    assert repository["imageTagMutability"] == "IMMUTABLE"
    assert repository["repositoryArn"] == stack.outputs()["Images"]
    stack.delete()
    assert not [name for names in cloud.resources().values() for name in names if name.startswith(f"{stack.name}-")]


@pytest.mark.parametrize("type", emulated_types())
def test_a_provider_declares_only_properties_that_it_knows(type: str) -> None:
    provider = provider_of(type)
    assert provider is not None
    assert provider.replacing <= provider.schema.fields.keys()
    assert provider.schema.required <= provider.schema.fields.keys()
    assert provider.volatile <= provider.attributes
    assert provider.name_property is None or provider.name_property in provider.replacing
