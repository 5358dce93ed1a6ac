"""EFS: what is made, what stays, and who may reach it."""

from __future__ import annotations

import aws_cdk as cdk
import pytest
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_kms as kms
from aws_cdk.assertions import Annotations, Match, Template

from traincluster import CheckpointBucket, ElasticFileSystem, TrainingCluster, TrainingJob, TrainingNetwork

JOB = TrainingJob(run="test-run", configuration={"steps": 10})


def only(stack: cdk.Stack, kind: str) -> dict:
    (resource,) = Template.from_stack(stack).find_resources(kind).values()
    return resource


def test_it_is_encrypted_and_in_the_subnet_of_the_nodes(stack):
    network = TrainingNetwork(stack, "Network")
    ElasticFileSystem(stack, "Home", network=network, encryption_key=kms.Key(stack, "Key"))
    properties = only(stack, "AWS::EFS::FileSystem")["Properties"]
    assert properties["Encrypted"] is True and properties["ThroughputMode"] == "elastic" and "KmsKeyId" in properties
    assert only(stack, "AWS::EFS::MountTarget")["Properties"]["SubnetId"] == stack.resolve(network.subnet.subnet_id)


def test_it_stays_and_says_so_unless_asked(stack):
    network = TrainingNetwork(stack, "Network")
    ElasticFileSystem(stack, "Home", network=network)
    home = only(stack, "AWS::EFS::FileSystem")
    assert home["DeletionPolicy"] == home["UpdateReplacePolicy"] == "Retain"
    assert "DeletionPolicy" not in only(stack, "AWS::EFS::MountTarget")
    Annotations.from_stack(stack).has_info("/Stack/Home", Match.string_like_regexp("stays when its stack is destroyed"))


def test_it_goes_when_asked(stack):
    ElasticFileSystem(stack, "Home", network=TrainingNetwork(stack, "Network"), removal_policy=cdk.RemovalPolicy.DESTROY)
    assert only(stack, "AWS::EFS::FileSystem")["DeletionPolicy"] == "Delete"
    Annotations.from_stack(stack).has_no_info("/Stack/Home", Match.any_value())


def test_nodes_reach_it_by_nfs_and_wait_for_its_mount_target(stack):
    network = TrainingNetwork(stack, "Network")
    home = ElasticFileSystem(stack, "Home", network=network)
    cluster = TrainingCluster(
        stack,
        "Cluster",
        network=network,
        instance_type="c7i.2xlarge",
        nodes=1,
        job=JOB,
        checkpoints=CheckpointBucket(stack, "Checkpoints"),
        file_systems=[home],
    )
    template = Template.from_stack(stack)
    (target,) = template.find_resources("AWS::EFS::MountTarget")
    assert target in only(stack, "AWS::AutoScaling::AutoScalingGroup")["DependsOn"]
    own = stack.resolve(home.security_group.security_group_id)
    ingress = template.find_resources("AWS::EC2::SecurityGroupIngress", {"Properties": {"GroupId": own}})
    assert [rule["Properties"]["FromPort"] for rule in ingress.values()] == [2049]
    assert not template.find_resources("AWS::EC2::SecurityGroupEgress", {"Properties": {"GroupId": own}})
    (mount,) = cluster.run_spec.storage.mounts
    assert (mount.type, mount.path) == ("nfs4", "/efs")


def test_traffic_over_tls_takes_the_helper_of_efs(stack):
    home = ElasticFileSystem(stack, "Home", network=TrainingNetwork(stack, "Network"), encrypt_in_transit=True)
    assert (home.mount.type, home.mount.options) == ("efs", "tls")


def test_an_existing_one_is_adopted(stack):
    group = ec2.SecurityGroup.from_security_group_id(stack, "Group", "sg-0123456789abcdef0")
    adopted = ElasticFileSystem.adopt(stack, "Home", file_system_id="fs-0123456789abcdef0", security_group=group, path="/home2")
    assert adopted.mount.source.startswith("fs-0123456789abcdef0.efs.") and adopted.mount.path == "/home2"
    with pytest.raises(ValueError, match="file_system_id is 'efs'"):
        ElasticFileSystem.adopt(stack, "Other", file_system_id="efs", security_group=group)


def test_only_two_removal_policies_make_sense(stack):
    with pytest.raises(ValueError, match="EFS takes RETAIN or DESTROY"):
        ElasticFileSystem(stack, "Home", network=TrainingNetwork(stack, "Network"), removal_policy=cdk.RemovalPolicy.SNAPSHOT)
