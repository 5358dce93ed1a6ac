"""Faults for exercise in a running cluster: what `traincluster chaos` does.

Everything goes through AWS's own interfaces, so that a real cluster and one of the local cloud are treated alike.
"""

from __future__ import annotations

import base64
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

NODE_PROGRAM = "${TRAINCLUSTER_ROOT:-}/opt/traincluster/bin/trainrun"
"""What the node agent puts down on each node for its commands to be run by hand (trainrun.node.service)."""

COMMAND_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault."""

    name: str
    summary: str
    on_node: bool = True
    """Whether the node itself makes it (python -m trainrun.node fault); else AWS is asked to."""
    temporary: bool = False
    at_random: bool = True
    """Whether it is among those that are made at random unless others are named: it hits one node, and nothing that others
    need."""


FAULTS = (
    Fault(name="kill-worker", summary="SIGKILL to one rank"),
    Fault(name="kill-agent", summary="SIGKILL to the node agent"),
    Fault(name="stop-rank", summary="SIGSTOP to one rank (0 seconds: for good)", temporary=True),
    Fault(name="cut-link", summary="nothing that the node sends arrives", temporary=True),
    Fault(name="metadata", summary="the metadata service is out of reach", temporary=True),
    Fault(name="fill-disk", summary="the disk of the node's state is full", temporary=True, at_random=False),
    Fault(name="spot-notice", summary="a spot interruption notice"),
    Fault(name="rebalance", summary="a rebalance recommendation"),
    Fault(name="maintenance", summary="a scheduled event that retires the instance"),
    Fault(name="kill-node", summary="EC2 ends the instance without a shutdown, as a power cut would", on_node=False),
    Fault(name="kill-host", summary="the same for the node that hosts the rendezvous", on_node=False),
    Fault(name="kill-all", summary="the same for all nodes at once", on_node=False, at_random=False),
    Fault(name="terminate", summary="Auto Scaling ends the instance, through its lifecycle hook if there is one", on_node=False),
    Fault(
        name="corrupt-payload",
        summary="the code that new nodes fetch is damaged in its bucket",
        on_node=False,
        temporary=True,
        at_random=False,
    ),
)
"""All that can be asked for."""


class ChaosError(ValueError):
    """A fault cannot be made; the text is a sentence."""


class Cluster:
    """A deployed cluster, as its stack's outputs tell of it."""

    def __init__(self, stack: str, *, region: str | None = None) -> None:
        """Args:
        stack: name of the CloudFormation stack, such as TrainingClusterStack.
        region: of the stack; None means the session's own.

        Raises:
            ChaosError: no such stack, or it has no cluster.
        """
        session = boto3.session.Session(region_name=region)
        self.stack, self.region = stack, session.region_name
        self._autoscaling, self._ec2 = session.client("autoscaling"), session.client("ec2")
        self._ssm, self._s3 = session.client("ssm"), session.client("s3")
        with _asking(f"the stack {stack}"):
            self.account: str = session.client("sts").get_caller_identity()["Account"]
            described = session.client("cloudformation").describe_stacks(StackName=stack)["Stacks"][0]
        outputs = {output["OutputKey"]: output["OutputValue"] for output in described.get("Outputs", [])}
        missing = {"AutoScalingGroupName", "RunLocation"} - set(outputs)
        if missing:
            raise ChaosError(f"The stack {stack} has no output {', '.join(sorted(missing))}: it is no TrainingClusterStack.")
        self.group, self.location = outputs["AutoScalingGroupName"], outputs["RunLocation"]

    def nodes(self) -> list[str]:
        """Ids of the instances in service, in alphabetical order."""
        with _asking(f"the group {self.group}"):
            groups = self._autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[self.group])["AutoScalingGroups"]
        return sorted(one["InstanceId"] for group in groups for one in group["Instances"] if one["LifecycleState"] == "InService")

    def host(self) -> str:
        """The node that hosts the rendezvous.

        Raises:
            ChaosError: none does.
        """
        newest = max(self._keys("rendezvous/"), default="")
        node = json.loads(self._read(newest))["node"] if newest else ""
        if node not in self.nodes():
            raise ChaosError("No node in service hosts the rendezvous at the moment.")
        return str(node)

    def holder_of_rank_0(self) -> str:
        """The node whose rank 0 wrote the newest metrics.

        Raises:
            ChaosError: no node in service has written any.
        """
        nodes = self.nodes()
        newest = sorted(self._objects("metrics/"), key=lambda item: item["LastModified"], reverse=True)
        for item in newest:
            for node in nodes:
                if f"/{node}-" in item["Key"]:
                    return node
        raise ChaosError("No node in service has written metrics yet, so that nobody knows where rank 0 is.")

    def on_node(self, node: str, fault: str, *, seconds: float) -> str:
        """Have a node make a fault. Returns what it says.

        Raises:
            ChaosError: it cannot, with what it says.
        """
        script = f'exec "{NODE_PROGRAM}" --node fault {fault} --seconds {seconds:g}'
        with _asking(f"Systems Manager to run a command on {node}"):
            parameters = {"commands": [script], "executionTimeout": [str(COMMAND_SECONDS)]}
            sent = self._ssm.send_command(DocumentName="AWS-RunShellScript", InstanceIds=[node], Parameters=parameters)
            command, deadline = sent["Command"]["CommandId"], time.monotonic() + COMMAND_SECONDS + 10
            while time.monotonic() < deadline:
                time.sleep(0.5)
                try:
                    found = self._ssm.get_command_invocation(CommandId=command, InstanceId=node)
                except self._ssm.exceptions.InvocationDoesNotExist:  # not yet
                    continue
                if found["Status"] == "Success":
                    return str(found["StandardOutputContent"]).strip()
                if found["Status"] not in ("Pending", "InProgress", "Delayed"):
                    said = found["StandardErrorContent"].strip() or found["StatusDetails"]
                    raise ChaosError(f"{fault} on {node} failed: {said}")
        raise ChaosError(f"{node} did not answer within {COMMAND_SECONDS} s. Does its Systems Manager agent run?")

    def cut_power(self, nodes: Sequence[str]) -> str:
        """End instances without a shutdown of their system."""
        with _asking("EC2 to terminate instances"):
            self._ec2.terminate_instances(InstanceIds=list(nodes), SkipOsShutdown=True)
        return f"ended {', '.join(nodes)} without a shutdown; the group replaces what it misses"

    def terminate(self, node: str) -> str:
        """Have the group end an instance and replace it."""
        with _asking("Auto Scaling to terminate an instance"):
            self._autoscaling.terminate_instance_in_auto_scaling_group(InstanceId=node, ShouldDecrementDesiredCapacity=False)
        return f"the group ends {node}, and replaces it"

    def corrupt_payload(self, seconds: float) -> str:
        """Damage the object that new nodes fetch their code from, and mend it after so many seconds.

        Raises:
            ChaosError: the payload is inside the user data, or the bucket lets nobody change it.
        """
        bucket, key = self._payload()
        with _asking(f"S3 for s3://{bucket}/{key}"):
            whole = self._s3.get_object(Bucket=bucket, Key=key)["Body"].read()
            try:
                self._s3.put_object(Bucket=bucket, Key=key, Body=bytes([whole[0] ^ 0xFF]) + whole[1:])
                time.sleep(seconds)
            finally:
                self._s3.put_object(Bucket=bucket, Key=key, Body=whole)
        return f"s3://{bucket}/{key} was damaged for {seconds:g} s, and is whole again"

    def _payload(self) -> tuple[str, str]:
        with _asking(f"the launch template of {self.group}"):
            (group,) = self._autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[self.group])["AutoScalingGroups"]
            policy: dict[str, Any] = dict(group.get("MixedInstancesPolicy", {}))
            template: Any = group.get("LaunchTemplate") or policy["LaunchTemplate"]["LaunchTemplateSpecification"]
            versions = self._ec2.describe_launch_template_versions(
                LaunchTemplateId=template["LaunchTemplateId"], Versions=[template["Version"]]
            )["LaunchTemplateVersions"]
        user_data = base64.b64decode(versions[0]["LaunchTemplateData"]["UserData"]).decode()
        found = [re.search(rf"^{name}=(\S+)$", user_data, flags=re.MULTILINE) for name in ("payload_bucket", "payload_key")]
        if None in found:
            raise ChaosError("The payload is small enough to be part of the user data, where nobody can damage it.")
        bucket, key = (match.group(1).strip("'\"") for match in found if match)
        return bucket, key

    def _objects(self, folder: str) -> list[dict[str, Any]]:
        bucket, _, prefix = self.location.removeprefix("s3://").partition("/")
        with _asking(f"{self.location}/{folder}"):
            pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/{folder}")
            return [dict(item) for page in pages for item in page.get("Contents", [])]

    def _keys(self, folder: str) -> list[str]:
        return [item["Key"] for item in self._objects(folder)]

    def _read(self, key: str) -> bytes:
        bucket = self.location.removeprefix("s3://").partition("/")[0]
        body: bytes = self._s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        return body


def choose_node(cluster: Cluster, wanted: str, *, luck: float) -> str:
    """An instance id for "any", "rank0", "other" (than rank 0's) or an id.

    Args:
        luck: 0 to 1, which of several it is.

    Raises:
        ChaosError: there is no such node.
    """
    nodes = cluster.nodes()
    if not nodes:
        raise ChaosError(f"The group {cluster.group} has no node in service.")
    if wanted == "rank0":
        return cluster.holder_of_rank_0()
    if wanted == "other":
        first = cluster.holder_of_rank_0()
        nodes = [node for node in nodes if node != first]
        if not nodes:
            raise ChaosError("The node of rank 0 is the only one in service.")
    elif wanted != "any":
        if wanted not in nodes:
            raise ChaosError(f"{wanted} is no node in service of {cluster.stack}. There are: {', '.join(nodes)}.")
        return wanted
    return nodes[min(int(luck * len(nodes)), len(nodes) - 1)]


def make(cluster: Cluster, fault: Fault, *, node: str, seconds: float, luck: float) -> str:
    """Make one fault now. Returns what was done.

    Args:
        cluster: in which.
        fault: which.
        node: "any", "rank0", "other" or an instance id; for a fault of one node.
        seconds: how long a temporary one lasts.
        luck: 0 to 1, which node "any" is.

    Raises:
        ChaosError: it cannot be made.
    """
    if fault.name == "kill-all":
        return cluster.cut_power(cluster.nodes())
    if fault.name == "kill-host":
        return cluster.cut_power([cluster.host()])
    if fault.name == "corrupt-payload":
        return cluster.corrupt_payload(seconds)
    chosen = choose_node(cluster, node, luck=luck)
    if fault.on_node:
        return f"{chosen}: {cluster.on_node(chosen, fault.name, seconds=seconds)}"
    return cluster.cut_power([chosen]) if fault.name == "kill-node" else cluster.terminate(chosen)


def at_random(faults: Sequence[Fault], *, seed: int) -> Iterator[tuple[Fault, float]]:
    """Faults without an end, each with the luck that chooses its node: the same for the same seed."""
    chance = random.Random(seed)
    while True:
        yield chance.choice(faults), chance.random()


def exercise(
    cluster: Cluster,
    faults: Sequence[Fault],
    *,
    seed: int,
    every: float,
    duration: float,
    seconds: float,
    tell: Callable[[str], None],
) -> None:
    """Make faults at random, one every so many seconds, for a time. One that cannot be made is told, and the next is made.

    Args:
        cluster: in which.
        faults: which.
        seed: of the choice.
        every: seconds between two.
        duration: seconds in all.
        seconds: how long a temporary one lasts.
        tell: takes what was done.
    """
    end = time.monotonic() + duration
    for fault, luck in at_random(faults, seed=seed):
        now = time.strftime("%H:%M:%S", time.gmtime())
        try:
            tell(f"{now} UTC {fault.name}: {make(cluster, fault, node='any', seconds=seconds, luck=luck)}")
        except ChaosError as problem:
            tell(f"{now} UTC {fault.name}: {problem}")
        if time.monotonic() + every > end:
            return
        time.sleep(every)


@contextmanager
def _asking(what: str) -> Iterator[None]:
    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise ChaosError(f"AWS was asked for {what}, and answered: {error}") from None
