"""Auto Scaling groups: what they launch, what EC2 refuses, and how they keep their size."""

from __future__ import annotations

import base64
import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from botocore.exceptions import ClientError
from groups import cluster, described, members


@pytest.fixture
def group(cloud, stack):
    """Deploys a group of up to four instances from a launch template, and takes it down at the end."""

    def deploy(data: dict[str, Any], *, minimum: int = 0, desired: int = 2, architecture: str = "x86_64", **more: Any) -> str:
        template = cluster(data, minimum=minimum, desired=desired, architecture=architecture)
        template["Resources"]["Group"]["Properties"].update(more)
        return stack.create(template)

    yield deploy
    stack.delete()


def failures(cloud, stack) -> list[str]:
    activities = cloud.client("autoscaling").describe_scaling_activities(AutoScalingGroupName=stack.physical("Group"))
    return [each["StatusMessage"] for each in activities["Activities"] if each["StatusCode"] == "Failed"]


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def interface(device: int, card: int = 0, **more: Any) -> dict[str, Any]:
    return {"DeviceIndex": device, "NetworkCardIndex": card, "Groups": [{"Ref": "Security"}], "DeleteOnTermination": True, **more}


def test_an_instance_is_what_its_launch_template_says(cloud, stack, group) -> None:
    assert (
        group(
            {
                "UserData": encoded("#!/bin/bash\necho hello\n"),
                "IamInstanceProfile": {"Arn": {"Fn::GetAtt": ["Profile", "Arn"]}},
                "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2},
                "Monitoring": {"Enabled": True},
                "NetworkInterfaces": [interface(0)],
                "Placement": {"GroupName": {"Ref": "Near"}},
                "TagSpecifications": [{"ResourceType": "instance", "Tags": [{"Key": "Name", "Value": "node"}]}],
                "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 120, "VolumeType": "gp3"}}],
            },
            Tags=[
                {"Key": "run", "Value": "r", "PropagateAtLaunch": True},
                {"Key": "own", "Value": "o", "PropagateAtLaunch": False},
            ],
        )
        == "CREATE_COMPLETE"
    )
    first, second = members(cloud, stack)
    assert first["LifecycleState"] == second["LifecycleState"] == "InService"
    instance = described(cloud, first["InstanceId"])
    assert instance["State"]["Name"] == "running"
    assert instance["InstanceType"] == "c7i.large"
    assert instance["PrivateIpAddress"].startswith("10.5.1.")
    assert instance["PrivateIpAddress"] != described(cloud, second["InstanceId"])["PrivateIpAddress"]
    assert instance["SubnetId"] == stack.physical("Subnet")
    assert [each["GroupId"] for each in instance["SecurityGroups"]] == [stack.physical("Security")]
    assert instance["IamInstanceProfile"]["Arn"].endswith(f"instance-profile/{stack.physical('Profile')}")
    assert instance["Placement"]["GroupName"] == stack.physical("Near")
    assert instance["MetadataOptions"]["HttpTokens"] == "required"
    assert instance["MetadataOptions"]["HttpPutResponseHopLimit"] == 2
    assert instance["LaunchTime"]
    tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
    assert tags["Name"] == "node" and tags["run"] == "r" and "own" not in tags
    assert tags["aws:autoscaling:groupName"] == stack.physical("Group")
    assert tags["aws:cloudformation:stack-name"] == stack.name
    ec2 = cloud.client("ec2")
    attribute = ec2.describe_instance_attribute(InstanceId=first["InstanceId"], Attribute="userData")
    assert base64.b64decode(attribute["UserData"]["Value"]) == b"#!/bin/bash\necho hello\n"
    volumes = [mapping["Ebs"]["VolumeId"] for mapping in instance["BlockDeviceMappings"]]
    assert [volume["Size"] for volume in ec2.describe_volumes(VolumeIds=volumes)["Volumes"]] == [120]


def test_every_efa_interface_of_every_card_is_there(cloud, stack, group) -> None:
    efa = [interface(0 if card == 0 else 1, card, InterfaceType="efa") for card in range(4)]
    assert group({"InstanceType": "p4d.24xlarge", "NetworkInterfaces": efa}, desired=1) == "CREATE_COMPLETE"
    instance = described(cloud, members(cloud, stack)[0]["InstanceId"])
    slots = {
        (each["Attachment"]["NetworkCardIndex"], each["Attachment"]["DeviceIndex"], each["InterfaceType"])
        for each in instance["NetworkInterfaces"][1:]
    }
    assert slots == {(1, 1, "efa"), (2, 1, "efa"), (3, 1, "efa")}
    addresses = [each["PrivateIpAddress"] for each in instance["NetworkInterfaces"]]
    assert len(set(addresses)) == 4
    cloud.client("autoscaling").update_auto_scaling_group(
        AutoScalingGroupName=stack.physical("Group"), MinSize=0, DesiredCapacity=0
    )
    left = cloud.client("ec2").describe_network_interfaces(Filters=[{"Name": "subnet-id", "Values": [stack.physical("Subnet")]}])
    assert left["NetworkInterfaces"] == []


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"SecurityGroupIds": [{"Ref": "Security"}], "NetworkInterfaces": [interface(0)]}, "instance-level security groups"),
        ({"NetworkInterfaces": [interface(0, SubnetId="subnet-12345678")]}, "instance-level subnet ID"),
        ({"NetworkInterfaces": [interface(0), interface(9)]}, "Invalid value '9' for DeviceIndex"),
        ({"NetworkInterfaces": [interface(0), interface(1, 1)]}, "Network card index 1 is not available on c7i.large"),
        ({"NetworkInterfaces": [interface(0), interface(0)]}, "unique device index"),
        ({"NetworkInterfaces": [interface(1)]}, "primary network interface"),
        (
            {"NetworkInterfaces": [interface(0, AssociatePublicIpAddress=False), interface(1)]},
            "associatePublicIPAddress parameter cannot be specified",
        ),
        ({"NetworkInterfaces": [interface(0, InterfaceType="efa")]}, "EFA interfaces are not supported on c7i.large"),
        ({"NetworkInterfaces": [interface(0, InterfaceType="fast")]}, "Invalid value 'fast' for InterfaceType"),
        ({"NetworkInterfaces": [interface(0, Groups=["sg-00000000"])]}, "security group 'sg-00000000' does not exist"),
        ({"UserData": encoded("x" * 16_385)}, "User data is limited to 16384 bytes; it has 16385"),
        ({"ImageId": "ami-00000000"}, "does not exist"),
        ({"InstanceType": "c7g.large"}, "does not match the architecture 'x86_64' of the specified AMI"),
        ({"InstanceType": "z9.huge"}, "Invalid value 'z9.huge' for InstanceType"),
        (
            {"BlockDeviceMappings": [{"DeviceName": "/dev/sdf", "Ebs": {"VolumeSize": 100, "VolumeType": "io2"}}]},
            "iops must be specified for io2 volumes",
        ),
        ({"Placement": {"GroupName": "nowhere"}}, "Placement Group 'nowhere' is unknown"),
        ({"IamInstanceProfile": {"Name": "nobody"}}, "Value (nobody) for parameter iamInstanceProfile.name"),
    ],
)
def test_what_ec2_refuses_becomes_a_failed_activity(cloud, stack, group, data: dict[str, Any], reason: str) -> None:
    assert group(data) == "CREATE_COMPLETE"  # the minimum of 0 is reached
    assert members(cloud, stack) == []
    (message,) = failures(cloud, stack)
    assert reason in message


def test_volumes_have_their_type_and_performance(cloud, stack, group) -> None:
    fast = {"VolumeSize": 640, "VolumeType": "io2", "Iops": 32_000, "DeleteOnTermination": True, "Encrypted": True}
    wide = {"VolumeSize": 100, "VolumeType": "gp3", "Iops": 4000, "Throughput": 500, "DeleteOnTermination": True}
    mappings = [{"DeviceName": "/dev/sdf", "Ebs": fast}, {"DeviceName": "/dev/sdg", "Ebs": wide}]
    group({"BlockDeviceMappings": mappings}, desired=1)
    (member,) = members(cloud, stack)
    found = {}
    for mapping in described(cloud, member["InstanceId"])["BlockDeviceMappings"]:
        (volume,) = cloud.client("ec2").describe_volumes(VolumeIds=[mapping["Ebs"]["VolumeId"]])["Volumes"]
        found[mapping["DeviceName"]] = (volume["Size"], volume["VolumeType"], volume["Iops"])
    assert found["/dev/sdf"] == (640, "io2", 32_000)
    assert found["/dev/sdg"] == (100, "gp3", 4000)


def test_user_data_of_exactly_the_limit_is_launched(cloud, stack, group) -> None:
    group({"UserData": encoded("x" * 16_384)}, desired=1)
    assert failures(cloud, stack) == []
    assert len(members(cloud, stack)) == 1


def test_a_group_that_cannot_reach_its_minimum_fails_the_stack(cloud, stack, group) -> None:
    assert group({"ImageId": "ami-00000000"}, minimum=2) == "ROLLBACK_COMPLETE"
    assert "Group did not stabilize. {current/minSize/maxSize group size = 0/2/4}" in stack.reasons()
    assert "'[ami-00000000]' does not exist" in stack.reasons()


def test_a_terminated_instance_is_replaced_by_one_with_another_address(cloud, stack, group) -> None:
    group({"UserData": encoded("again")})
    ec2 = cloud.client("ec2")
    before = {each["InstanceId"]: described(cloud, each["InstanceId"])["PrivateIpAddress"] for each in members(cloud, stack)}
    lost = next(iter(before))
    ec2.terminate_instances(InstanceIds=[lost])
    after = {each["InstanceId"]: described(cloud, each["InstanceId"]) for each in members(cloud, stack)}
    assert len(after) == 2 and lost not in after
    new = next(instance for name, instance in after.items() if name not in before)
    assert new["PrivateIpAddress"] not in before.values()
    assert new["LaunchTime"] >= described(cloud, lost)["LaunchTime"]
    attribute = ec2.describe_instance_attribute(InstanceId=new["InstanceId"], Attribute="userData")
    assert base64.b64decode(attribute["UserData"]["Value"]) == b"again"
    found = cloud.client("autoscaling").describe_auto_scaling_instances(InstanceIds=[new["InstanceId"]])
    assert found["AutoScalingInstances"][0]["AutoScalingGroupName"] == stack.physical("Group")


def test_a_group_is_held_to_its_bounds_and_scales_to_nothing(cloud, stack, group) -> None:
    group({}, minimum=1)
    scaling, name = cloud.client("autoscaling"), stack.physical("Group")
    ids = [each["InstanceId"] for each in members(cloud, stack)]
    with pytest.raises(ClientError, match="above max value 4"):
        scaling.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=5)
    with pytest.raises(ClientError, match="below min value 1"):
        scaling.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=0)
    scaling.update_auto_scaling_group(AutoScalingGroupName=name, MinSize=0, DesiredCapacity=0)
    assert members(cloud, stack) == []
    assert {described(cloud, each)["State"]["Name"] for each in ids} == {"terminated"}
    scaling.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=3)
    assert len(members(cloud, stack)) == 3


def test_new_user_data_rolls_through_the_group(cloud, stack, group) -> None:
    group({"UserData": encoded("one")})
    before = {each["InstanceId"] for each in members(cloud, stack)}
    assert stack.update(cluster({"UserData": encoded("two")}, minimum=0, desired=2)) == "UPDATE_COMPLETE"
    after = {each["InstanceId"] for each in members(cloud, stack)}
    assert len(after) == 2 and not after & before
    attribute = cloud.client("ec2").describe_instance_attribute(InstanceId=after.pop(), Attribute="userData")
    assert base64.b64decode(attribute["UserData"]["Value"]) == b"two"


def test_what_ec2_refuses_takes_an_update_back(cloud, stack, group) -> None:
    group({"UserData": encoded("one")}, minimum=1)
    broken = cluster({"UserData": encoded("x" * 20_000)}, minimum=1, desired=2)
    assert stack.update(broken) == "UPDATE_ROLLBACK_COMPLETE"
    assert "User data is limited to 16384 bytes" in stack.reasons()
    attribute = cloud.client("ec2").describe_instance_attribute(
        InstanceId=members(cloud, stack)[0]["InstanceId"], Attribute="userData"
    )
    assert base64.b64decode(attribute["UserData"]["Value"]) == b"one"


def test_a_group_of_arm_machines_takes_an_arm_image(cloud, stack, group) -> None:
    assert group({"InstanceType": "c7g.large"}, desired=1, architecture="arm64") == "CREATE_COMPLETE"
    assert described(cloud, members(cloud, stack)[0]["InstanceId"])["Architecture"] == "arm64"


def scheduled(start: datetime) -> dict[str, Any]:
    """A drain of the group."""
    properties = {"AutoScalingGroupName": {"Ref": "Group"}, "StartTime": f"{start:%Y-%m-%dT%H:%M:%SZ}"}
    return {"Type": "AWS::AutoScaling::ScheduledAction", "Properties": {**properties, "MinSize": 0, "DesiredCapacity": 0}}


def test_a_scheduled_action_is_taken_when_its_time_has_come(cloud, stack):
    template = cluster({}, minimum=0, desired=2)
    template["Resources"]["Drain"] = scheduled(datetime.now(timezone.utc) + timedelta(seconds=8))
    assert stack.create(template) == "CREATE_COMPLETE"
    name = stack.physical("Group")
    client = cloud.client("autoscaling")
    deadline = time.monotonic() + 30
    while client.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"][0]["Instances"]:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    stack.delete()


def test_a_scheduled_action_goes_with_its_stack_or_is_refused_when_it_comes_too_late(cloud, stack, other_stack):
    template = cluster({}, minimum=0, desired=0)
    template["Resources"]["Drain"] = scheduled(datetime.now(timezone.utc) + timedelta(days=30))
    assert stack.create(template) == "CREATE_COMPLETE"
    group = stack.physical("Group")
    described = cloud.client("autoscaling").describe_scheduled_actions(AutoScalingGroupName=group)
    (action,) = described["ScheduledUpdateGroupActions"]
    assert (action["MinSize"], action["DesiredCapacity"]) == (0, 0)
    stack.delete()
    assert cloud.client("autoscaling").describe_scheduled_actions()["ScheduledUpdateGroupActions"] == []
    template["Resources"]["Drain"] = scheduled(datetime.now(timezone.utc) - timedelta(days=1))
    assert other_stack.create(template) == "ROLLBACK_COMPLETE"
    assert "Given start time is in the past" in other_stack.reasons()
    other_stack.delete()


def test_several_types_on_spot_are_launched_from_one_template(cloud, stack):
    template = cluster({"InstanceType": "c7i.large"}, minimum=0, desired=2)
    group = template["Resources"]["Group"]["Properties"]
    group["MixedInstancesPolicy"] = {
        "LaunchTemplate": {
            "LaunchTemplateSpecification": group.pop("LaunchTemplate"),
            "Overrides": [{"InstanceType": "c7i.large"}, {"InstanceType": "c6i.large"}],
        },
        "InstancesDistribution": {
            "OnDemandBaseCapacity": 0,
            "OnDemandPercentageAboveBaseCapacity": 0,
            "SpotAllocationStrategy": "price-capacity-optimized",
        },
    }
    assert stack.create(template) == "CREATE_COMPLETE"
    name = stack.physical("Group")
    (made,) = cloud.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"]
    assert len(made["Instances"]) == 2
    stack.delete()
