"""FSx for Lustre and EFS in the emulated cloud: what they refuse, what they make, what they leave."""

from __future__ import annotations

import copy
import json
import uuid
from typing import Any

import pytest
from botocore.exceptions import ClientError

VPC = {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.9.0.0/16"}}
SUBNET = {
    "Type": "AWS::EC2::Subnet",
    "Properties": {"VpcId": {"Ref": "Vpc"}, "CidrBlock": "10.9.0.0/24", "AvailabilityZone": "us-east-1a"},
}
GROUP = {
    "Type": "AWS::EC2::SecurityGroup",
    "Properties": {
        "GroupDescription": "fsx",
        "VpcId": {"Ref": "Vpc"},
        "SecurityGroupEgress": [{"CidrIp": "255.255.255.255/32", "IpProtocol": "icmp", "FromPort": 252, "ToPort": 86}],
    },
}


LNET_PORTS: list[tuple[int, int] | None] = [(988, 988), (1018, 1023)]


def rules() -> dict[str, Any]:
    """Ingress and egress of the group with itself."""
    made: dict[str, Any] = {}
    own = {"Ref": "Group"}
    for number, (first, last) in enumerate([(988, 988), (1018, 1023)]):
        extent = {"IpProtocol": "tcp", "FromPort": first, "ToPort": last}
        into = {"GroupId": own, "SourceSecurityGroupId": own, **extent}
        out = {"GroupId": own, "DestinationSecurityGroupId": own, **extent}
        made[f"In{number}"] = {"Type": "AWS::EC2::SecurityGroupIngress", "Properties": into}
        made[f"Out{number}"] = {"Type": "AWS::EC2::SecurityGroupEgress", "Properties": out}
    return made


LNET = rules()


def template(
    *, waits: bool = True, among: dict[str, Any] = LNET, lustre: dict[str, Any] | None = None, **properties: Any
) -> dict[str, Any]:
    configuration = {"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 125, **(lustre or {})}
    file_system = {
        "Type": "AWS::FSx::FileSystem",
        "Properties": {
            "FileSystemType": "LUSTRE",
            "FileSystemTypeVersion": "2.15",
            "StorageCapacity": 4800,
            "SubnetIds": [{"Ref": "Subnet"}],
            "SecurityGroupIds": [{"Ref": "Group"}],
            "LustreConfiguration": {name: value for name, value in configuration.items() if value is not None},
            **properties,
        },
    }
    file_system["Properties"] = {name: value for name, value in file_system["Properties"].items() if value is not None}
    file_system["DependsOn"] = list(among)
    resources = {"Vpc": VPC, "Subnet": SUBNET, "Group": GROUP, "Fsx": file_system, **copy.deepcopy(among)}
    outputs = {name: {"Value": {"Fn::GetAtt": ["Fsx", name]}} for name in ("DNSName", "LustreMountName", "ResourceARN")}
    return {"Resources": resources, "Outputs": outputs}


def test_a_file_system_comes_with_its_names_and_goes(own_cloud) -> None:
    formation, before = own_cloud.client("cloudformation"), own_cloud.resources()
    formation.create_stack(StackName="lustre", TemplateBody=json.dumps(template()))
    stack = formation.describe_stacks(StackName="lustre")["Stacks"][0]
    assert stack["StackStatus"] == "CREATE_COMPLETE"
    outputs = {one["OutputKey"]: one["OutputValue"] for one in stack["Outputs"]}
    assert outputs["DNSName"].endswith(".fsx.us-east-1.amazonaws.com")
    assert len(outputs["LustreMountName"]) == 8
    assert len(own_cloud.resources()["AWS::FSx::FileSystem"]) == 1
    formation.delete_stack(StackName="lustre")
    assert own_cloud.resources() == before


@pytest.fixture(scope="module")
def network(cloud) -> dict[str, Any]:
    """A subnet, and a group that permits what Lustre needs among its members."""
    ec2 = cloud.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.8.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.8.0.0/24")["Subnet"]["SubnetId"]
    return {"vpc": vpc, "SubnetIds": [subnet], "SecurityGroupIds": [group_of(cloud, vpc, LNET_PORTS)]}


def group_of(cloud, vpc: str, ports: list[tuple[int, int] | None], *, ways: str = "ingress egress") -> str:
    """A security group whose only rules let its members reach each other."""
    ec2 = cloud.client("ec2")
    group: str = ec2.create_security_group(GroupName=f"g{uuid.uuid4().hex}", Description="fsx", VpcId=vpc)["GroupId"]
    everything = {"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    ec2.revoke_security_group_egress(GroupId=group, IpPermissions=[everything])
    for span in ports:
        extent = {"IpProtocol": "-1"} if span is None else {"IpProtocol": "tcp", "FromPort": span[0], "ToPort": span[1]}
        for way in ways.split():
            permission = {**extent, "UserIdGroupPairs": [{"GroupId": group}]}
            getattr(ec2, f"authorize_security_group_{way}")(GroupId=group, IpPermissions=[permission])
    return group


def create(cloud, network: dict[str, Any], *, lustre: dict[str, Any] | None = None, **changes: Any) -> str:
    """CreateFileSystem of a good file system with changes; None takes a setting away."""
    configuration = {"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 125, **(lustre or {})}
    request = {
        "FileSystemType": "LUSTRE",
        "FileSystemTypeVersion": "2.15",
        "StorageCapacity": 4800,
        "SubnetIds": network["SubnetIds"],
        "SecurityGroupIds": network["SecurityGroupIds"],
        "LustreConfiguration": {name: value for name, value in configuration.items() if value is not None},
        **changes,
    }
    answer = cloud.client("fsx").create_file_system(**{name: value for name, value in request.items() if value is not None})
    identifier: str = answer["FileSystem"]["FileSystemId"]
    return identifier


EFA = {"EfaEnabled": True, "MetadataConfiguration": {"Mode": "AUTOMATIC"}}
TIERED = {"StorageType": "INTELLIGENT_TIERING", "StorageCapacity": None}
PROVISIONED = {"Mode": "USER_PROVISIONED"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"StorageCapacity": 5000}, "does not meet the storage capacity requirement"),
        ({"StorageCapacity": None}, "does not meet the storage capacity requirement"),
        ({"lustre": {"PerUnitStorageThroughput": None}}, "Throughput must be specified for PERSISTENT_2"),
        ({"lustre": {"PerUnitStorageThroughput": 200}}, "PerUnitStorageThroughput 200 is invalid"),
        ({"lustre": {"DeploymentType": "SCRATCH_2"}}, "not supported for SCRATCH"),
        ({"lustre": {"EfaEnabled": True}}, "with a metadata configuration only"),
        ({"lustre": EFA}, "The storage capacity 4800 is invalid for an EFA-enabled"),
        ({"lustre": {"MetadataConfiguration": PROVISIONED}}, "Iops is required"),
        ({"lustre": {"MetadataConfiguration": {**PROVISIONED, "Iops": 2000}}}, "Metadata Iops 2000 is invalid"),
        ({"FileSystemTypeVersion": "2.10"}, "2.10 is not supported for PERSISTENT_2"),
        ({"StorageType": "HDD"}, "StorageType HDD is not supported"),
        ({**TIERED, "StorageCapacity": 4800}, "StorageCapacity is not supported"),
        ({**TIERED, "lustre": {"ThroughputCapacity": 5000}}, "ThroughputCapacity 5000 is invalid"),
        ({**TIERED, "lustre": {"ThroughputCapacity": 4000}}, "DataReadCacheConfiguration is required"),
        ({"SubnetIds": ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"]}, "Exactly one subnet"),
    ],
)
def test_what_fsx_refuses(changes, says, cloud, network) -> None:
    with pytest.raises(ClientError, match=says):
        create(cloud, network, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"lustre": {"DeploymentType": "SCRATCH_2", "PerUnitStorageThroughput": None}, "StorageCapacity": 1200},
        {"lustre": {"DeploymentType": "SCRATCH_1", "PerUnitStorageThroughput": None}, "StorageCapacity": 3600},
        {
            "lustre": {"DeploymentType": "PERSISTENT_1", "PerUnitStorageThroughput": 12, "DriveCacheType": "NONE"},
            "StorageType": "HDD",
            "StorageCapacity": 6000,
        },
        {
            **TIERED,
            "lustre": {
                "PerUnitStorageThroughput": None,
                "ThroughputCapacity": 4000,
                "DataReadCacheConfiguration": {"SizingMode": "NO_CACHE"},
            },
        },
    ],
)
def test_what_fsx_takes(changes, cloud, network) -> None:
    identifier = create(cloud, network, **changes)
    (found,) = cloud.client("fsx").describe_file_systems(FileSystemIds=[identifier])["FileSystems"]
    assert len(found["LustreConfiguration"]["MountName"]) == 8


@pytest.mark.parametrize(
    ("ports", "ways"), [([], "ingress egress"), ([(988, 988)], "ingress egress"), (LNET_PORTS, "ingress"), (LNET_PORTS, "egress")]
)
def test_syn_05_ports_have_to_be_open_when_it_is_made(ports, ways, cloud, network) -> None:
    group = group_of(cloud, network["vpc"], ports, ways=ways)
    with pytest.raises(ClientError, match="do not permit Lustre LNET network traffic on port"):
        create(cloud, network, SecurityGroupIds=[group])


def test_syn_05_a_file_system_that_does_not_wait_for_its_rules_fails_the_stack(stack) -> None:
    assert stack.create(template(among={})) == "ROLLBACK_COMPLETE"
    assert "do not permit Lustre LNET network traffic on port 988" in stack.reasons()


def test_efa_takes_all_traffic_of_the_group(cloud, network) -> None:
    with pytest.raises(ClientError, match="do not permit all traffic among themselves"):
        create(cloud, network, lustre=EFA, StorageCapacity=38_400)
    create(cloud, network, lustre=EFA, StorageCapacity=38_400, SecurityGroupIds=[group_of(cloud, network["vpc"], [None])])


def test_create_only_settings_replace_the_file_system(stack) -> None:
    stack.create(template())
    first = stack.physical("Fsx")
    changed = template(lustre={"DeploymentType": "SCRATCH_2", "PerUnitStorageThroughput": None})
    assert stack.update(changed) == "UPDATE_COMPLETE"
    assert stack.physical("Fsx") != first


def link(path: str, bucket: Any = None, **more: Any) -> dict[str, Any]:
    place = {"Fn::Sub": "s3://${Bucket}/corpus"} if bucket is None else bucket
    return {
        "Type": "AWS::FSx::DataRepositoryAssociation",
        "Properties": {"FileSystemId": {"Ref": "Fsx"}, "FileSystemPath": path, "DataRepositoryPath": place, **more},
    }


def test_links_with_s3_come_and_go(cloud, stack) -> None:
    body = template()
    policy = {"AutoImportPolicy": {"Events": ["NEW"]}, "AutoExportPolicy": {"Events": ["NEW", "CHANGED"]}}
    body["Resources"] |= {
        "Bucket": {"Type": "AWS::S3::Bucket"},
        "Link": link("/corpus", S3=policy, BatchImportMetaDataOnCreate=True),
    }
    body["Outputs"]["Link"] = {"Value": {"Fn::GetAtt": ["Link", "AssociationId"]}}
    assert stack.create(body) == "CREATE_COMPLETE"
    identifier = stack.outputs()["Link"]
    fsx = cloud.client("fsx")
    (found,) = fsx.describe_data_repository_associations(AssociationIds=[identifier])["Associations"]
    assert found["S3"] == policy and found["FileSystemPath"] == "/corpus"
    stack.delete()
    with pytest.raises(ClientError, match="does not exist"):
        fsx.describe_data_repository_associations(AssociationIds=[identifier])


def test_links_that_fsx_refuses(cloud, network) -> None:
    fsx, bucket = cloud.client("fsx"), f"corpus-{uuid.uuid4().hex[:12]}"
    cloud.client("s3").create_bucket(Bucket=bucket)
    file_system = create(cloud, network)

    def associate(path: str, *, to: str = bucket, of: str = file_system) -> None:
        fsx.create_data_repository_association(FileSystemId=of, FileSystemPath=path, DataRepositoryPath=f"s3://{to}/web")

    associate("/a")
    for path in ("/a", "/a/b", "/"):
        with pytest.raises(ClientError, match="overlaps with the association of /a"):
            associate(path)
    with pytest.raises(ClientError, match="does not exist or cannot be accessed"):
        associate("/b", to="no-such-bucket-anywhere")
    for number in range(7):
        associate(f"/more{number}")
    with pytest.raises(ClientError, match="at most 8"):
        associate("/ninth")
    old = create(cloud, network, lustre={"DeploymentType": "SCRATCH_1", "PerUnitStorageThroughput": None}, StorageCapacity=3600)
    with pytest.raises(ClientError, match="not supported on this file system"):
        associate("/a", of=old)
    fsx.delete_file_system(FileSystemId=file_system)
    left = fsx.describe_data_repository_associations()["Associations"]
    assert file_system not in [link["FileSystemId"] for link in left]


def test_efs_with_mount_target_and_access_point(cloud, stack) -> None:
    home = {
        "Type": "AWS::EFS::FileSystem",
        "Properties": {
            "Encrypted": True,
            "ThroughputMode": "elastic",
            "FileSystemTags": [{"Key": "Name", "Value": "home"}],
            "LifecyclePolicies": [{"TransitionToIA": "AFTER_30_DAYS"}],
        },
    }
    target = {
        "Type": "AWS::EFS::MountTarget",
        "Properties": {"FileSystemId": {"Ref": "Home"}, "SubnetId": {"Ref": "Subnet"}, "SecurityGroups": [{"Ref": "Group"}]},
    }
    point = {
        "Type": "AWS::EFS::AccessPoint",
        "Properties": {
            "FileSystemId": {"Ref": "Home"},
            "PosixUser": {"Uid": "1000", "Gid": "1000"},
            "RootDirectory": {"Path": "/user"},
        },
    }
    resources = {"Vpc": VPC, "Subnet": SUBNET, "Group": GROUP, "Home": home, "Target": target, "Point": point}
    outputs = {
        "Address": {"Value": {"Fn::GetAtt": ["Target", "IpAddress"]}},
        "Arn": {"Value": {"Fn::GetAtt": ["Home", "Arn"]}},
        "Point": {"Value": {"Fn::GetAtt": ["Point", "AccessPointId"]}},
    }
    assert stack.create({"Resources": resources, "Outputs": outputs}) == "CREATE_COMPLETE"
    identifier = stack.physical("Home")
    efs = cloud.client("efs")
    (found,) = efs.describe_file_systems(FileSystemId=identifier)["FileSystems"]
    assert found["Encrypted"] is True and found["Name"] == "home" and found["NumberOfMountTargets"] == 1
    (access,) = efs.describe_access_points(FileSystemId=identifier)["AccessPoints"]
    assert access["PosixUser"] == {"Uid": 1000, "Gid": 1000}
    assert stack.outputs()["Address"].startswith("10.9.0.")
    stack.delete()
    with pytest.raises(ClientError, match="does not exist"):
        efs.describe_file_systems(FileSystemId=identifier)
