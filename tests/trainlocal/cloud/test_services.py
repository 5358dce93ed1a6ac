"""What is added to moto beside CloudFormation, and the server itself."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ClientError

from trainlocal.fleet.control import hand_over

LOCAL = Path(__file__).parents[3] / "local"


def pass_socket(directory: Path, passed: socket.socket) -> dict[str, str]:
    """Sends a socket to the cloud as its contract has it, and returns its answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(directory / "cloud.sock"))
        socket.send_fds(connection, [b"\0"], [passed.fileno()])
        answer: dict[str, str] = json.loads(connection.makefile().readline())
    return answer


def test_placement_groups(cloud, stack) -> None:
    ec2 = cloud.client("ec2")
    tags = [{"ResourceType": "placement-group", "Tags": [{"Key": "k", "Value": "v"}]}]
    made = ec2.create_placement_group(GroupName=stack.name, Strategy="cluster", TagSpecifications=tags)["PlacementGroup"]
    assert made["State"] == "available" and made["Tags"] == [{"Key": "k", "Value": "v"}]
    by_strategy = ec2.describe_placement_groups(Filters=[{"Name": "strategy", "Values": ["cluster"]}])["PlacementGroups"]
    assert stack.name in [group["GroupName"] for group in by_strategy]
    with pytest.raises(ClientError, match=r"InvalidPlacementGroup\.Duplicate"):
        ec2.create_placement_group(GroupName=stack.name, Strategy="spread")
    with pytest.raises(ClientError, match="PartitionCount is valid only"):
        ec2.create_placement_group(GroupName="x", Strategy="spread", PartitionCount=3)
    ec2.delete_placement_group(GroupName=stack.name)
    with pytest.raises(ClientError, match=r"InvalidPlacementGroup\.Unknown"):
        ec2.describe_placement_groups(GroupNames=[stack.name])


@pytest.mark.parametrize("region", ["us-east-1", "eu-west-1"])
def test_published_images_have_parameters_and_exist(cloud, region: str) -> None:
    ssm, ec2 = cloud.client("ssm", region), cloud.client("ec2", region)
    for name, architecture in (
        ("/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id", "x86_64"),
        ("/aws/service/deeplearning/ami/arm64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id", "arm64"),
        ("/aws/service/neuron/dlami/multi-framework/ubuntu-24.04/latest/image_id", "x86_64"),
    ):
        image_id = ssm.get_parameter(Name=name)["Parameter"]["Value"]
        image = ec2.describe_images(ImageIds=[image_id])["Images"][0]
        assert image["Architecture"] == architecture
    with pytest.raises(ClientError, match="ParameterNotFound"):
        ssm.get_parameter(Name="/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-9.9/latest/ami-id")


def test_a_commit_is_written_by_one_of_many_and_never_overwritten(cloud, stack) -> None:
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket=stack.name)

    def commit(writer: int) -> int | None:
        try:
            s3.put_object(Bucket=stack.name, Key="COMMIT", Body=str(writer).encode(), IfNoneMatch="*")
        except ClientError as error:
            assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 412
            return None
        return writer

    with ThreadPoolExecutor(8) as pool:
        winners = [winner for winner in pool.map(commit, range(8)) if winner is not None]
    assert len(winners) == 1
    assert s3.get_object(Bucket=stack.name, Key="COMMIT")["Body"].read() == str(winners[0]).encode()


def test_only_unconditional_statements_of_bucket_policies_count(cloud, stack) -> None:
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket=stack.name)
    deny = {"Effect": "Deny", "Principal": "*", "Action": "s3:PutObject", "Resource": f"arn:aws:s3:::{stack.name}/*"}
    conditional = {**deny, "Condition": {"Bool": {"aws:SecureTransport": "false"}}}
    s3.put_bucket_policy(Bucket=stack.name, Policy=json.dumps({"Version": "2012-10-17", "Statement": [conditional]}))
    s3.put_object(Bucket=stack.name, Key="k", Body=b"x")
    s3.put_bucket_policy(Bucket=stack.name, Policy=json.dumps({"Version": "2012-10-17", "Statement": [deny]}))
    with pytest.raises(ClientError, match="403"):
        s3.put_object(Bucket=stack.name, Key="k", Body=b"x")


def test_large_bodies_and_polling_go_beside_each_other(cloud, stack) -> None:
    cloud.client("s3").create_bucket(Bucket=stack.name)
    body = os.urandom(20_000_000)

    def carry(index: int) -> bool:
        s3 = boto3.Session(aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1").client(
            "s3", endpoint_url=cloud.endpoint
        )
        s3.put_object(Bucket=stack.name, Key=f"k{index}", Body=body)
        part = s3.get_object(Bucket=stack.name, Key=f"k{index}", Range="bytes=1000-1999")["Body"].read()
        return bool(part == body[1000:2000] and s3.get_object(Bucket=stack.name, Key=f"k{index}")["Body"].read() == body)

    polls = []
    ended = threading.Event()

    def poll() -> None:
        scaling = cloud.client("autoscaling")
        while not ended.is_set():
            polls.append(len(scaling.describe_auto_scaling_groups()["AutoScalingGroups"]))
            ended.wait(0.02)

    poller = threading.Thread(target=poll)
    poller.start()
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(carry, range(3))) == [True, True, True]
    ended.set()
    poller.join(timeout=30)
    assert polls


def test_what_moto_lacks_is_refused_at_once_and_by_name(cloud) -> None:
    with pytest.raises(ClientError, match=r"NotEmulated.*lookup_events"):
        cloud.client("cloudtrail").lookup_events()


def test_sockets_passed_in_are_served(cloud) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert pass_socket(cloud.directory, listening) == {"serving": address}
    with urllib.request.urlopen(f"http://{address}/_traincluster/resources", timeout=30) as answer:
        assert json.load(answer) == cloud.resources()


def test_the_folder_may_lie_deeper_than_a_socket_address_is_long(tmp_path: Path, start_cloud) -> None:
    deep = tmp_path.joinpath(*["a-rather-long-name-of-a-folder"] * 5)
    process, _ = start_cloud(deep)
    assert process.stdin is not None
    with socket.create_server(("127.0.0.1", 0)) as listening:
        hand_over(deep / "cloud.sock", listening)
    process.stdin.close()
    assert process.wait(timeout=20) == 0


def test_a_socket_that_does_not_listen_is_refused(cloud) -> None:
    with socket.socket() as idle:
        assert "not a listening TCP socket" in pass_socket(cloud.directory, idle)["error"]


def test_the_server_names_itself_and_cleans_up_behind_itself(tmp_path: Path, own_cloud) -> None:
    state = json.loads((tmp_path / "cloud.json").read_text())
    assert state["endpoint"] == own_cloud.endpoint
    assert own_cloud.resources() == {}
    os.kill(state["pid"], 15)
    deadline = threading.Event()
    for _ in range(100):
        if not (tmp_path / "cloud.json").exists():
            break
        deadline.wait(0.1)
    assert not (tmp_path / "cloud.json").exists()
    assert not (tmp_path / "cloud.sock").exists()


def test_the_inventory_lists_what_the_services_hold(own_cloud) -> None:
    ec2 = own_cloud.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.1.0.0/24")["Subnet"]["SubnetId"]
    interface = ec2.create_network_interface(SubnetId=subnet)["NetworkInterface"]["NetworkInterfaceId"]
    volume = ec2.create_volume(AvailabilityZone="us-east-1a", Size=1)["VolumeId"]
    listed = own_cloud.resources()
    assert listed["AWS::EC2::VPC"] == [vpc]
    assert listed["AWS::EC2::Subnet"] == [subnet]
    assert listed["AWS::EC2::NetworkInterface"] == [interface]
    assert listed["AWS::EC2::Volume"] == [volume]
    assert own_cloud.resources("eu-west-1") == {}


@pytest.mark.parametrize(
    ("attempt", "reason"),
    [
        ("socket.create_connection(('192.0.2.1', 80))", "does not connect to 192.0.2.1"),
        ("socket.getaddrinfo('example.com', 80)", "does not look up example.com"),
    ],
)
def test_the_process_of_the_cloud_cannot_reach_beyond_the_machine(attempt: str, reason: str) -> None:
    program = f"import socket\nfrom trainlocal.cloud.fence import fence_off\nfence_off()\n{attempt}"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(LOCAL)}, capture_output=True, timeout=60
    )
    assert done.returncode != 0
    assert reason in done.stderr.decode()


def test_a_notification_to_a_web_address_stays_here(cloud, stack) -> None:
    sns = cloud.client("sns")
    topic = sns.create_topic(Name=stack.name)["TopicArn"]
    sns.subscribe(TopicArn=topic, Protocol="https", Endpoint="https://example.com/hook")
    assert sns.publish(TopicArn=topic, Message="hello")["MessageId"]
