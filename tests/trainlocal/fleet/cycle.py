"""The life of a group of two nodes, as a program: `cycle.py DIRECTORY TIER` prints what it saw as one JSON object.

It is a program, and not part of the test, because some tiers need another user than the one that runs the tests.
"""

import base64
import json
import os
import sys
import time
from pathlib import Path

import boto3

import trainlocal

SERVICES = ("ec2", "iam", "autoscaling", "s3", "ssm")
USER_DATA = """\
#!/bin/bash
set -eu
"${TRAINCLUSTER_PYTHON:-/opt/pytorch/bin/python}" - <<'PYTHON'
import json, os, pathlib, socket, subprocess, threading, time, urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
import boto3

def metadata(path, method="GET", **headers):
    base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254")
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(base + "/latest/" + path, method=method, headers=headers)
    return urllib.request.urlopen(request, timeout=5).read().decode()

token = metadata("api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds="60")
get = lambda path: metadata(path, X_aws_ec2_metadata_token=token)
address, instance_id = get("meta-data/local-ipv4"), get("meta-data/instance-id")

class Hello(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(instance_id.encode())

def storage():
    # Formats and mounts what the node has, with the commands that a real node would call.
    run = lambda *command: subprocess.run(command, check=True, capture_output=True, text=True).stdout
    disks = json.loads(run("lsblk", "--json", "--output", "PATH,SERIAL"))["blockdevices"]
    data = disks[1]["path"]
    for path in ("/data", "/fsx"):
        os.mkdir(path)
    run("mkfs.xfs", data)
    run("modinfo", "lustre")
    lustre = "fs-1.fsx.us-east-1.amazonaws.com@tcp:/abc"
    said = run("mount", "-t", "xfs", "-o", "noatime", data, "/data") + run("mount", "-t", "lustre", "-o", "flock", lustre, "/fsx")
    for folder in ("/data", "/fsx"):
        pathlib.Path(folder, instance_id).touch()
    return {
        "volumes": [disk["serial"].replace("vol", "vol-") for disk in disks],
        "formatted": json.loads(run("lsblk"))["blockdevices"][1]["fstype"],
        "mount_says": said,
        "own_files": os.listdir("/data"),
        "shared_files": os.listdir("/fsx"),
    }

server = HTTPServer((address, 0), Hello)
threading.Thread(target=server.serve_forever, daemon=True).start()
isolated = "TRAINCLUSTER_ROOT" not in os.environ  # isolated nodes have names and a root of their own
facts = {
    "instance_id": instance_id,
    "address": address,
    "host": get("meta-data/local-hostname") if isolated else address,
    "port": server.server_port,
    "metadata_disabled": os.environ.get("AWS_EC2_METADATA_DISABLED"),
}
if isolated:
    facts.update(
        hostname=socket.gethostname(),
        reverse=socket.gethostbyaddr(address)[0],
        processes=sum(name.isdigit() for name in os.listdir("/proc")),
        first_process=pathlib.Path("/proc/1/comm").read_text().strip(),
        root=sorted(os.listdir("/")),
        interfaces=sorted(os.listdir("/sys/class/net")),
        **storage(),
    )
s3 = boto3.client("s3")
s3.put_object(Bucket="facts", Key=instance_id, Body=json.dumps(facts))
peer, deadline = None, time.monotonic() + 20
while peer is None and time.monotonic() < deadline:
    for item in s3.list_objects_v2(Bucket="facts")["Contents"]:
        if item["Key"] == instance_id or item["Key"].endswith("-greeted"):
            continue
        other = json.loads(s3.get_object(Bucket="facts", Key=item["Key"])["Body"].read())
        try:
            peer = urllib.request.urlopen("http://%s:%d/" % (other["host"], other["port"]), timeout=2).read().decode()
        except OSError:
            continue  # it has ended meanwhile
    time.sleep(0.1)
s3.put_object(Bucket="facts", Key=instance_id + "-greeted", Body=json.dumps(peer))
if os.fork() == 0:  # greet others for as long as the node lives
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    server.serve_forever()
PYTHON
"""


def wait_for(check, seconds, what):
    """The first true answer of `check`, which is asked for at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not (result := check()):
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {seconds} s for {what}")
        time.sleep(0.1)
    return result


def make_group(clients, size):
    """A bucket for what the nodes write, and a group of `size` with all that it needs."""
    clients["s3"].create_bucket(Bucket="facts")
    ec2, iam = clients["ec2"], clients["iam"]
    iam.create_role(RoleName="node-role", AssumeRolePolicyDocument="{}")
    iam.create_instance_profile(InstanceProfileName="nodes")
    iam.add_role_to_instance_profile(InstanceProfileName="nodes", RoleName="node-role")
    vpc = ec2.create_vpc(CidrBlock="10.7.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.7.16.0/20", AvailabilityZone="us-east-1a")["Subnet"]["SubnetId"]
    ec2.create_launch_template(
        LaunchTemplateName="nodes",
        LaunchTemplateData={
            "ImageId": ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"],
            "InstanceType": "c5.large",
            "IamInstanceProfile": {"Name": "nodes"},
            "BlockDeviceMappings": [
                {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 120, "VolumeType": "gp3"}},
                {"DeviceName": "/dev/sdf", "Ebs": {"VolumeSize": 10, "VolumeType": "gp3"}},
            ],
            "UserData": base64.b64encode(USER_DATA.encode()).decode(),
        },
    )
    clients["autoscaling"].create_auto_scaling_group(
        AutoScalingGroupName="nodes",
        LaunchTemplate={"LaunchTemplateName": "nodes", "Version": "$Latest"},
        MinSize=0,
        MaxSize=4,
        DesiredCapacity=size,
        VPCZoneIdentifier=subnet,
    )


def written_by(clients, key):
    """What a node wrote into the bucket, or None."""
    try:
        return json.loads(clients["s3"].get_object(Bucket="facts", Key=key)["Body"].read())
    except clients["s3"].exceptions.NoSuchKey:
        return None


def two_running(local, without=""):
    """The two running nodes, or None while there are not two, or one of them is `without`."""
    if failed := [node for node in local.nodes() if node.state == "failed"]:
        raise SystemExit(f"{failed}")
    nodes = [node for node in local.nodes() if node.state == "running"]
    return nodes if len(nodes) == 2 and all(node.instance_id != without for node in nodes) else None


def by_systems_manager(clients, node, script, *, wait=True):
    """What Systems Manager says of a script on a node."""
    ssm = clients["ssm"]
    parameters = {"commands": script.splitlines()}
    sent = ssm.send_command(DocumentName="AWS-RunShellScript", InstanceIds=[node], Parameters=parameters)["Command"]["CommandId"]
    if not wait:
        return None

    def ended():
        found = ssm.get_command_invocation(CommandId=sent, InstanceId=node)
        return found if found["Status"] not in ("Pending", "InProgress") else None

    found = wait_for(ended, 20, "a command on a node")
    return {name: found[name] for name in ("Status", "ResponseCode", "StandardOutputContent", "StandardErrorContent")}


def main(directory, tier):
    with trainlocal.start(Path(directory), tier) as local:
        os.environ.update(local.environment())
        clients = {name: boto3.client(name) for name in SERVICES}
        make_group(clients, 2)
        first = wait_for(lambda: two_running(local), 60, "two nodes to run")
        seen = {
            "tier": local.tier,
            "description": local.description,
            "boot_seconds": [node.boot_seconds for node in first],
            "facts": {node.instance_id: written_by(clients, node.instance_id) for node in first},
            "greeted": {node.instance_id: written_by(clients, node.instance_id + "-greeted") for node in first},
            "addresses": {node.instance_id: node.address for node in first},
            "pids_exist": [Path(f"/proc/{node.pid}").exists() for node in first],
            "logs": sorted(path.name for path in first[0].logs.iterdir()),
        }
        killed, survivor = (node.instance_id for node in first)
        seen["managed"] = [
            node["InstanceId"] for node in clients["ssm"].describe_instance_information()["InstanceInformationList"]
        ]
        script = 'cd "${TRAINCLUSTER_ROOT:-/}"\npwd\necho "no such thing" >&2\nexit 3'
        seen["said"] = by_systems_manager(clients, survivor, script)
        seen["leaves"] = by_systems_manager(clients, survivor, "sleep 60 & echo left")
        by_systems_manager(clients, survivor, "sleep 60", wait=False)  # the fleet is not kept by it
        clients["ec2"].terminate_instances(InstanceIds=[killed], SkipOsShutdown=True)
        after = wait_for(lambda: two_running(local, without=killed), 60, "the replacement to run")
        (replacement,) = {node.instance_id for node in after} - {node.instance_id for node in first}
        seen["greeted"][replacement] = written_by(clients, replacement + "-greeted")
        seen["killed"], seen["after_kill"] = killed, [node.instance_id for node in after]
        clients["autoscaling"].update_auto_scaling_group(AutoScalingGroupName="nodes", MinSize=0, DesiredCapacity=0)
        wait_for(lambda: all(node.state == "dead" for node in local.nodes()), 40, "all nodes to end")
        seen["at_the_end"] = {node.instance_id: node.detail for node in local.nodes()}
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
